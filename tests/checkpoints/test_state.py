"""Loading states of a run: tensors that share memory, and extra state of modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard import Checkpoints


class Held:
    """An object of the user, whose state is a dict of tensors."""

    def __init__(self, **state: torch.Tensor) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_tensors_that_share_memory_load_different_values(tmp_path: Path) -> None:
    """Tensors of a state that share memory, with each other or with a weight, are loaded with their own values."""
    model, shared = nn.Linear(2, 2), torch.zeros(2)
    bias = model.bias.detach().clone()
    saved = {"average": torch.ones(2), "first": torch.full((2,), 2.0), "second": torch.full((2,), 3.0)}
    checkpoints = Checkpoints(tmp_path, asynchronous=False)
    checkpoints.save(model, at=1, held=Held(**saved))
    fresh = Held(average=model.bias.detach(), first=shared, second=shared)
    checkpoints.load(model, held=fresh)
    torch.testing.assert_close(fresh.state, saved)
    torch.testing.assert_close(model.bias.detach(), bias)


def test_a_place_holds_each_element(tmp_path: Path) -> None:
    """A tensor that is expanded or on the meta device is replaced by a new tensor with the saved values."""
    model, checkpoints = nn.Linear(2, 2), Checkpoints(tmp_path, asynchronous=False)
    checkpoints.save(model, at=1, held=Held(a=torch.arange(2.0), b=torch.ones(2)))
    fresh = Held(a=torch.zeros(1).expand(2), b=torch.ones(2, device="meta"))
    checkpoints.load(model, held=fresh)
    torch.testing.assert_close(fresh.state, {"a": torch.arange(2.0), "b": torch.ones(2)})


class Scales(nn.Module):
    """A module with extra state."""

    def __init__(self, extra: Any = None) -> None:
        super().__init__()
        self.weight, self.dropout, self.extra = nn.Parameter(torch.ones(2)), nn.Dropout(), extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.dropout(inputs * self.weight)


@pytest.mark.parametrize("now", [None, {"a": torch.zeros(2)}, {"a": torch.zeros(3)}], ids=["none", "same", "other"])
def test_tensors_in_extra_state_are_loaded(now: Any, tmp_path: Path) -> None:
    """Extra state of modules is loaded, whether the module had None, tensors of the same shape, or of another."""
    checkpoints = Checkpoints(tmp_path, asynchronous=False)
    checkpoints.save(nn.Sequential(Scales({"a": torch.ones(2)}), Scales(torch.ones(1))), at=1)
    fresh = nn.Sequential(Scales(now), Scales(torch.ones(4)))
    checkpoints.load(fresh)
    torch.testing.assert_close([item.extra for item in fresh], [{"a": torch.ones(2)}, torch.ones(1)])


def test_extra_state_of_a_compiled_model_is_loaded(tmp_path: Path) -> None:
    """A compiled model loads its module's extra state and its seeds, and a plain module loads its own extra state
    from it."""
    inputs, checkpoints = (torch.ones(2, 2),), Checkpoints(tmp_path, asynchronous=False)
    saved, fresh = (
        autoshard.compile(Scales(extra), autoshard.Mesh({"data": 2}), example_inputs=inputs)
        for extra in ({"a": torch.ones(2)}, None)
    )
    saved(*inputs)
    checkpoints.save(saved, at=1)
    checkpoints.load(fresh)
    plain = Scales()
    checkpoints.load(plain)
    torch.testing.assert_close([fresh.get_extra_state()["model"], plain.extra], [{"a": torch.ones(2)}] * 2)
    assert torch.equal(fresh.seeds.state(), saved.seeds.state())


class Odd(torch.optim.SGD):
    """An optimizer whose state dict is not that of torch."""

    def state_dict(self) -> dict[str, Any]:
        return {"mine": 3}


def test_a_state_dict_of_another_form_is_refused(tmp_path: Path) -> None:
    """An optimizer whose state dict has no 'state' is refused with its class and its keys."""
    model = nn.Linear(2, 2)
    with pytest.raises(autoshard.CheckpointError, match=r"Odd has the keys \['mine'\], without 'state'"):
        Checkpoints(tmp_path, asynchronous=False).save(model, at=1, optimizer=Odd(model.parameters(), lr=0.1))
