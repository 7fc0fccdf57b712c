"""Torch's state-dict functions save and load a model on ranks, in parts and as whole tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

import autoshard
from autoshard import Mesh, P
from tests.end_to_end.training import plain_step
from tests.models import Tied
from tests.runtime.processes import on_processes

PAIR = Mesh({"data": 2})
ROWS = {"embed.weight": P("data"), "linear.*": P("data"), "input:0": P("data")}
COLUMNS = {"embed.weight": P(None, "data"), "linear.weight": P(None, "data"), "input:0": P("data")}
TOKENS = torch.arange(16) % 13

TRACED, OWN = torch.optim.AdamW, torch.optim.RMSprop


def compiled(kind: Callable[..., Any], constraints: dict[str, Any] = ROWS, model: nn.Module | None = None) -> Any:
    torch.manual_seed(0)
    model = Tied(dropout=0.1) if model is None else model
    optimizer = kind(model.parameters(), lr=1e-2)
    step = autoshard.compile(model, PAIR, optimizer=optimizer, example_inputs=(TOKENS,), constraints=constraints)
    assert step.is_traced is (kind is TRACED)
    return step


def losses(step: Any, count: int = 3) -> list[Tensor]:
    return [step(TOKENS) for _ in range(count)]


def wholes(state: dict[str, Any]) -> dict[str, Any]:
    return {name: item.full_tensor() if isinstance(item, DTensor) else item for name, item in state.items()}


def check_state_is_restored(kind: Callable[..., Any], options: StateDictOptions | None) -> None:
    """After torch's functions restore an earlier state, steps repeat its losses bit by bit."""
    step = compiled(kind)
    model, optimizer = step.sharded, step.optimizer
    losses(step)
    state = copy.deepcopy(get_state_dict(model, optimizer, options=options))
    is_full = options is not None and options.full_state_dict
    assert isinstance(state[0]["embed.weight"], DTensor) is (dist.is_initialized() and not is_full)
    assert state[0].keys() == model.state_dict().keys()
    expected = losses(step)
    set_state_dict(model, optimizer, model_state_dict=state[0], optim_state_dict=state[1], options=options)
    assert losses(step) == expected


def check_one_rank_has_all(kind: Callable[..., Any]) -> None:
    """A whole state that only the first rank has is loaded into a model with another layout on all ranks."""
    step, other = compiled(kind), compiled(kind, COLUMNS)
    losses(step)
    taken = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model, optimizer = copy.deepcopy(
        (
            get_model_state_dict(step.sharded, options=taken),
            get_optimizer_state_dict(step.sharded, step.optimizer, options=taken),
        )
    )
    assert bool(model) is (dist.get_rank() == 0)
    expected = losses(step)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other.sharded, model, options=options)
    set_optimizer_state_dict(other.sharded, other.optimizer, optimizer, options=options)
    torch.testing.assert_close(losses(other), expected)


def check_one_device_goes_on(kind: Callable[..., Any]) -> None:
    """A whole state from ranks is loaded into a plain model and optimizer, whose next losses are equal."""
    step = compiled(kind, model=Tied(dropout=0.0))
    losses(step)
    full = StateDictOptions(full_state_dict=True)
    model_state, optimizer_state = copy.deepcopy(get_state_dict(step.sharded, step.optimizer, options=full))
    expected = losses(step)
    model = Tied(dropout=0.0)
    optimizer = kind(model.parameters(), lr=1e-2)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state, options=full)
    torch.testing.assert_close(plain_losses(model, optimizer), expected)


def check_what_one_device_had_is_loaded(kind: Callable[..., Any]) -> None:
    """A plain model's state is loaded by torch's functions or `load_state_dict`, and the next losses are equal."""
    model = Tied(dropout=0.0)
    optimizer = kind(model.parameters(), lr=1e-2)
    plain_losses(model, optimizer)
    state, names = copy.deepcopy((model.state_dict(), get_optimizer_state_dict(model, optimizer)))
    plain = copy.deepcopy(optimizer.state_dict())
    expected = plain_losses(model, optimizer)
    full = StateDictOptions(full_state_dict=True)
    for by_torch in (True, False):
        step = compiled(kind, model=Tied(dropout=0.0))
        if by_torch:
            set_model_state_dict(step.sharded, copy.deepcopy(state), options=full)
            set_optimizer_state_dict(step.sharded, step.optimizer, copy.deepcopy(names), options=full)
        else:
            step.sharded.load_state_dict(state)
            step.optimizer.load_state_dict(copy.deepcopy(plain))
        torch.testing.assert_close(losses(step), expected)


def plain_losses(model: nn.Module, optimizer: Any, count: int = 3) -> list[Tensor]:
    return [plain_step(model, optimizer, TOKENS) for _ in range(count)]


def check_parts_and_wholes() -> None:
    """`state_dict()` has each rank's part without a copy, and whole values load into a plain model and back."""
    step = compiled(TRACED)
    losses(step)
    state = step.sharded.state_dict()
    weight = step.sharded.get_parameter("embed.weight")
    assert state["embed.weight"].to_local().data_ptr() == weight.to_local().data_ptr()
    assert state["embed.weight"].to_local().shape[0] == (7, 6)[dist.get_rank()]
    plain = Tied(dropout=0.1)
    assert plain.state_dict().keys() == state.keys() - {"_extra_state"}
    state.pop("_extra_state")
    plain.load_state_dict(wholes(state))
    other = compiled(TRACED, COLUMNS)
    other.sharded.load_state_dict(plain.state_dict())
    for name, value in plain.state_dict().items():
        assert torch.equal(wholes(other.sharded.state_dict())[name], value)


def check_frozen_and_strict() -> None:
    """Torch's options leave out frozen parameters, and only `strict=False` allows missing ones."""
    model = Tied(dropout=0.1)
    model.linear.requires_grad_(False)
    sharded = autoshard.compile(model, PAIR, example_inputs=(TOKENS,), constraints=ROWS)
    found = get_model_state_dict(sharded, options=StateDictOptions(ignore_frozen_params=True))
    assert "linear.weight" not in found
    assert "embed.weight" in found
    full = copy.deepcopy(get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True)))
    del full["linear.weight"]
    nn.init.constant_(sharded.get_parameter("embed.weight"), 3.0)
    with pytest.raises(RuntimeError, match=r"[Mm]issing key.*linear.weight"):
        sharded.load_state_dict(full)
    set_model_state_dict(sharded, {**full}, options=StateDictOptions(full_state_dict=True, strict=False))
    assert torch.equal(wholes(sharded.state_dict())["embed.weight"], full["embed.weight"])


OPTIONS: dict[str, StateDictOptions | None] = {
    "parts": None,
    "parts on the CPU": StateDictOptions(cpu_offload=True),
    "parts under flat names": StateDictOptions(flatten_optimizer_state_dict=True),
    "wholes": StateDictOptions(full_state_dict=True),
}

CHECKS: dict[str, Callable[[], None]] = {
    "parts and wholes": check_parts_and_wholes,
    "frozen, strict": check_frozen_and_strict,
}
for _name, _options in OPTIONS.items():
    CHECKS[f"AdamW: {_name}"] = partial(check_state_is_restored, TRACED, _options)
CHECKS["RMSprop: wholes"] = partial(check_state_is_restored, OWN, OPTIONS["wholes"])
for _kind in (TRACED, OWN):
    CHECKS[f"{_kind.__name__}: the first rank has all"] = partial(check_one_rank_has_all, _kind)
    CHECKS[f"{_kind.__name__}: to one device"] = partial(check_one_device_goes_on, _kind)
    CHECKS[f"{_kind.__name__}: from one device"] = partial(check_what_one_device_had_is_loaded, _kind)

test_with_a_process_per_rank = on_processes(CHECKS, ranks=2, sample=8)


@pytest.mark.parametrize("options", [None, StateDictOptions(full_state_dict=True)], ids=["parts", "wholes"])
def test_on_the_simulator(options: StateDictOptions | None) -> None:
    """On the simulator, torch's functions restore whole parameters, and steps repeat their losses."""
    check_state_is_restored(TRACED, options)
