"""Calls without gradients run through the pipeline, and every rank gets the outputs of one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autoshard
from autoshard import Mesh, NotAvailableError, P, Recipe
from tests.end_to_end.test_pipelines import adamw, compiled
from tests.end_to_end.training import plain_step, whole
from tests.runtime.processes import on_processes
from tests.runtime.test_known_programs import check_freed


class Heads(nn.Module):
    """A classifier that returns a loss, early and late results and a mask; one head is used in training alone."""

    def __init__(self, layers: int = 4, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.auxiliary = nn.Linear(width, 16)
        self.head = nn.Linear(width, 16)

    def forward(self, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
        hidden, early = self.embed(tokens), 0.0
        first = hidden
        for number, layer in enumerate(self.layers):
            hidden = F.dropout(torch.tanh(layer(hidden)), 0.5 if self.training else 0.0) + hidden
            if number == 1 and self.training:
                early = F.cross_entropy(self.auxiliary(hidden).flatten(0, 1), targets.flatten())
            first = hidden if number == 0 else first
        logits = self.head(hidden)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + early
        return {"loss": loss, "first": first, "logits": logits, "mask": tokens > 2}


def heads() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    tokens = torch.randint(0, 16, (8, 4), generator=torch.Generator().manual_seed(1))
    return Heads(), {"tokens": tokens, "targets": tokens.roll(1, 1)}


def in_stages(axes: dict[str, int], **options: Any) -> tuple[Any, nn.Module, dict[str, Tensor]]:
    model, inputs = heads()
    settings = {"micro_batches": 4, "max_grad_norm": 0.3, "time_budget_s": 5.0, **options}
    return autoshard.compile(model, Mesh(axes), optimizer=adamw(model), **settings), model, inputs


def trained(steps: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the model, trained on one device for some steps without dropout, and its batch."""
    model, inputs = heads()
    optimizer = adamw(model)
    for _ in range(steps):
        plain_step(model.eval(), optimizer, limit=0.3, **inputs)
    return model.eval(), inputs


def assert_evaluates(step: Any, reference: nn.Module, inputs: dict[str, Tensor], mode: Callable[..., Any]) -> None:
    with mode():
        found, expected = step.sharded(**inputs), reference(**inputs)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].requires_grad is False
        torch.testing.assert_close(whole(found[name]), value, rtol=1e-5, atol=1e-6, msg=f"{name} differs")


def evaluates_between_steps(axes: dict[str, int], **options: Any) -> None:
    """Check that evaluations before the first step and after two steps equal one device, for two batch sizes."""
    step, _, inputs = in_stages(axes, **options)
    step.sharded.eval()
    assert_evaluates(step, trained(0)[0], inputs, torch.no_grad)
    assert step.plan.schedule == "forward"
    for _ in range(2):
        step(**inputs)
    assert step.plan.schedule != "forward"
    reference, _ = trained(2)
    assert_evaluates(step, reference, inputs, torch.inference_mode)
    assert_evaluates(step, reference, {name: value[:3] for name, value in inputs.items()}, torch.no_grad)


EVALUATIONS = {
    "ZeRO-3": partial(
        evaluates_between_steps, {"pipeline": 2, "data": 2}, constraints={"*weight": P("data"), "*:*weight": P("data")}
    ),
    "V": partial(evaluates_between_steps, {"pipeline": 2}, recipe=Recipe(schedule="ZBVZeroBubble")),
    "whole outputs": partial(
        evaluates_between_steps,
        {"data": 2, "pipeline": 2},
        recipe=Recipe(virtual_stages=2),
        options=autoshard.Options(gather_outputs=True),
    ),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", EVALUATIONS)
def test_simulated_stages_evaluate(name: str) -> None:
    """Every output of an evaluation in simulated stages equals one device, whichever stage computes it."""
    EVALUATIONS[name]()


def test_an_encoder_decoder_evaluates() -> None:
    """T5 in three stages evaluates to all outputs of one device."""
    step, model, inputs = compiled("t5", Mesh({"pipeline": 3}))
    with torch.no_grad():
        found, expected = step.sharded(**inputs), model(**inputs)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5, msg=f"{name} differs")


def test_evaluation_keeps_to_the_stages_of_a_given_plan() -> None:
    """With a given plan, an evaluation before the first step equals one device, and the step then runs the plan."""
    model, inputs = heads()
    step, _, _ = in_stages({"pipeline": 4})
    step.sharded.eval()
    plan = step.compile_for(**inputs)
    again = autoshard.compile(model.eval(), Mesh({"pipeline": 4}), optimizer=adamw(model), plan=plan, max_grad_norm=0.3)
    assert_evaluates(again, trained(0)[0], inputs, torch.no_grad)
    assert float(again(**inputs)) == pytest.approx(trained(0)[0](**inputs)["loss"].item(), rel=1e-5)
    assert again.plan == plan


def test_random_numbers_of_a_call_without_gradients() -> None:
    """Under `no_grad` in training mode, dropout in two stages equals that without stages, and each call draws anew."""
    found = []
    for axes in ({"pipeline": 2}, {"data": 1}):
        step, _, inputs = in_stages(axes)
        torch.manual_seed(3)
        with torch.no_grad():
            found.append([step.sharded(**inputs)["loss"] for _ in range(2)])
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)
    assert found[0][0] != found[0][1]


def test_a_buffer_that_a_call_changes_is_refused() -> None:
    """In stages, a batch norm in training raises, with and without gradients; in evaluation it equals one device."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    step = autoshard.compile(model, Mesh({"pipeline": 2}), optimizer=adamw(model), loss_fn=F.mse_loss)
    x, target = torch.randn(8, 4), torch.randn(8, 1)
    with pytest.raises(NotAvailableError, match="changes buffer"):
        step(x, target)
    with torch.no_grad(), pytest.raises(NotAvailableError, match="changes buffer"):
        step.sharded(x, target)
    expected = F.mse_loss(copy.deepcopy(model).eval()(x), target)
    with torch.no_grad():
        torch.testing.assert_close(step.sharded.eval()(x, target), expected, rtol=1e-5, atol=1e-6)


def _gradients_are_refused() -> None:
    step, _, inputs = in_stages({"pipeline": 2})
    with pytest.raises(NotAvailableError, match=r"wants gradients.*under torch.no_grad\(\)"):
        step.sharded.eval()(**inputs)
    assert_evaluates(step, trained(0)[0], inputs, torch.no_grad)


CHECKS_OF_TWO = {
    "V": EVALUATIONS["V"],
    "gradients": _gradients_are_refused,
    "forgotten": partial(check_freed, {"pipeline": 2}),
}
CHECKS_OF_FOUR = {name: EVALUATIONS[name] for name in ("ZeRO-3", "whole outputs")}

test_two_processes = on_processes(CHECKS_OF_TWO, ranks=2, slow=["forgotten"])

test_four_processes = on_processes(CHECKS_OF_FOUR, ranks=4, sample=1)
