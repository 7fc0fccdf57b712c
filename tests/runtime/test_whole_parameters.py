"""Parameters that an optimizer needs whole are kept whole, and arguments that would split them are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard import Mesh, NotAvailableError, P, Recipe
from autoshard.runtime.whole_parameters import plain_parameters, with_whole_parameters
from tests.own_optimizers import Lion, Shampoo

MESH = Mesh({"data": 2})
X = torch.ones(4, 4)


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))


def _loss(outputs: torch.Tensor) -> torch.Tensor:
    return outputs.square().mean()


def _compiled(make: Any, **options: Any) -> Any:
    model = _model()
    optimizer = make(model.parameters(), lr=0.1)
    return autoshard.compile(model, MESH, optimizer=optimizer, loss_fn=_loss, example_inputs=(X,), **options)


def test_parameters_are_constrained_by_name() -> None:
    """Shampoo adds a constraint to whole for each parameter to the user's constraints, and Lion adds none."""
    model, given = _model(), {"input:0": P("data")}
    found = with_whole_parameters(given, Shampoo(model.parameters()), model, recipe=None, fixed=None)
    assert found == {"input:0": P("data"), "0.weight": P(), "0.bias": P(), "1.weight": P()}
    assert with_whole_parameters(given, Lion(model.parameters()), model, recipe=None, fixed=None) == given


@pytest.mark.parametrize(
    ("options", "splits"),
    [
        ({"constraints": {"*.weight": P("data")}}, r"constraints\['\*.weight'\] splits '0.weight'"),
        ({"recipe": Recipe(zero=3)}, r"Recipe\(zero=3\) splits parameters"),
    ],
    ids=["constraints", "recipe"],
)
@pytest.mark.parametrize("make", [torch.optim.Adafactor, torch.optim.Rprop, Shampoo])
def test_arguments_that_split_are_refused_at_compile(make: Any, options: dict[str, Any], splits: str) -> None:
    """Constraints or a recipe that split parameters raise an error that names the optimizer and the argument."""
    name = make.__name__
    with pytest.raises(NotAvailableError, match=f"optimizer={name} needs each parameter whole.*{splits}.*or use AdamW"):
        _compiled(make, **options)


def test_a_plan_that_splits_is_refused() -> None:
    """A plan with split weights, made for RMSprop, is refused for Adafactor."""
    plan = _compiled(torch.optim.RMSprop, constraints={"*.weight": P("data")}).plan
    with pytest.raises(NotAvailableError, match=r"optimizer=Adafactor needs each.*plan= splits '0.weight'"):
        _compiled(torch.optim.Adafactor, plan=plan)
    assert _compiled(torch.optim.RMSprop, plan=plan).plan.parameters["0.weight"].spec == P("data")


def test_the_plan_keeps_the_parameters_whole() -> None:
    """In a plan made for Adafactor, each parameter is whole."""
    step = _compiled(torch.optim.Adafactor)
    assert {name: item.spec for name, item in step.plan.parameters.items()} == dict.fromkeys(
        ("0.weight", "0.bias", "1.weight"), P()
    )


def test_plain_tensors_stay_as_they_are() -> None:
    """`plain_parameters` does not replace parameters that are plain tensors."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.RMSprop([parameter])
    with plain_parameters(optimizer):
        assert optimizer.param_groups[0]["params"][0] is parameter
