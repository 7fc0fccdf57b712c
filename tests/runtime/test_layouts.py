"""A step does little Python work per parameter: layouts are cached, and placed tensors stay as they are."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import autoshard
from autoshard import P
from autoshard.ir.mesh import Mesh
from autoshard.runtime.layouts import Layouts
from tests.runtime.processes import checked_once, report

FEW, MANY = 4, 10
CALLS_OF_A_STEP, CALLS_OF_A_CALL = 20, 50
"""Most calls of Python functions per parameter, in a traced step and in a call with a backward.

Calls for the operators of the parameter's layer are counted too.
"""


@contextmanager
def _counting(counts: Counter[str]) -> Iterator[None]:
    """Count the calls of Python functions by name, within this context."""

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            counts[frame.f_code.co_name] += 1

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def _model(layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers)))


def _traced_step(layers: int) -> Callable[[], Any]:
    model, mesh = _model(layers), init_device_mesh("cpu", (1,), mesh_dim_names=("data",))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = autoshard.compile(model, mesh, optimizer=optimizer, loss_fn=F.mse_loss)
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    return lambda: step(x, y)


def _backward(layers: int) -> Callable[[], Any]:
    model, mesh = _model(layers), init_device_mesh("cpu", (1,), mesh_dim_names=("data",))
    sharded = autoshard.compile(model, mesh)
    assert isinstance(sharded, nn.Module)
    x = torch.randn(4, 3)

    def run() -> None:
        sharded.zero_grad()
        sharded(x).sum().backward()

    return run


def _calls_per_parameter(make: Callable[[int], Callable[[], Any]]) -> float:
    found = []
    for layers in (FEW, MANY):
        run, counts = make(layers), Counter[str]()
        for _ in range(3):
            run()
        with _counting(counts):
            run()
        found.append(sum(counts.values()))
    return (found[1] - found[0]) / (2 * (MANY - FEW))


def check_calls_of_a_step() -> None:
    """A traced step calls at most `CALLS_OF_A_STEP` Python functions for each parameter."""
    found = _calls_per_parameter(_traced_step)
    assert found <= CALLS_OF_A_STEP, found


def check_calls_of_a_backward() -> None:
    """A call with its backward calls at most `CALLS_OF_A_CALL` Python functions for each parameter."""
    found = _calls_per_parameter(_backward)
    assert found <= CALLS_OF_A_CALL, found


def check_a_step_makes_no_dtensor() -> None:
    """A later step makes no DTensor, clones nothing, and runs one fused AdamW kernel."""
    step = _traced_step(FEW)
    for _ in range(3):
        step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    counts = Counter(event.name for event in profiler.events() or ())
    assert counts["_FromTorchTensor"] == 0
    assert counts["aten::_fused_adamw_"] == 1
    assert counts["aten::clone"] == 0


def check_swapped_parameters() -> None:
    """After a parameter is overwritten, swapped or loaded between steps, steps equal one device."""
    model, mesh = _model(2), init_device_mesh("cpu", (1,), mesh_dim_names=("data",))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = autoshard.compile(model, mesh, optimizer=optimizer, loss_fn=F.mse_loss)
    alone = _model(2)
    other = torch.optim.SGD(alone.parameters(), lr=0.1)
    for number in range(4):
        x, y = torch.randn(4, 3), torch.randn(4, 3)
        _change(number, step.sharded, alone)
        other.zero_grad()
        loss = F.mse_loss(alone(x), y)
        loss.backward()
        other.step()
        torch.testing.assert_close(step(x, y), loss.detach())
        for (name, mine), theirs in zip(step.sharded.named_parameters(), alone.parameters(), strict=True):
            assert torch.allclose(mine.full_tensor(), theirs, atol=1e-6), (number, name)  # type: ignore[operator]


@torch.no_grad()
def _change(number: int, sharded: nn.Module, alone: nn.Module) -> None:
    value = torch.full((3, 3), 0.1 * number)
    mine, theirs = sharded.get_parameter("0.weight"), alone.get_parameter("0.weight")
    theirs.copy_(value)
    if number == 1:
        mine.to_local().copy_(value)  # type: ignore[attr-defined]
    elif number == 2:
        made = nn.Parameter(torch.distributed.tensor.DTensor.from_local(value, mine.device_mesh, mine.placements))  # type: ignore[attr-defined]
        torch.utils.swap_tensors(mine, made)
    else:
        sharded.load_state_dict({**sharded.state_dict(), "0.weight": value})


CHECKS = {
    "calls of a step": check_calls_of_a_step,
    "calls of a backward": check_calls_of_a_backward,
    "no DTensor": check_a_step_makes_no_dtensor,
    "swapped": check_swapped_parameters,
}


outcomes = checked_once(CHECKS, ranks=1)


@pytest.mark.parametrize("name", CHECKS)
def test_on_one_process(outcomes: dict[str, str], name: str) -> None:
    """The check passes."""
    report(outcomes, name)


def test_layouts_are_found_once() -> None:
    """`Layouts` returns the same object for the same placements and shape, with the shapes of the rank's part."""
    layouts = Layouts(Mesh({"data": 2, "model": 2}), rank=3)
    found = layouts.of([Shard(0), Replicate()], (5, 4))
    assert layouts.of((Shard(0), Replicate()), torch.Size((5, 4))) is found
    assert (found.spec, found.padded, found.chunk, found.stride) == (P("data"), (3, 4), (2, 4), (4, 1))
    stored = layouts.stored(P(("model", "data")), (9,))
    assert stored.spec == P(("data", "model"))
    assert not stored.is_cut_alike
