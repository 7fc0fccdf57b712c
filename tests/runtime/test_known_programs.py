"""Programs are cached up to a maximum number, and dropped programs are freed."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard import Mesh
from autoshard.ir.program import InputKind
from autoshard.runtime.known_programs import KnownPrograms
from autoshard.runtime.per_program import PerProgram
from autoshard.runtime.sharded_module import ShardedModule
from tests.models import Chain


def test_the_program_used_least_recently_is_forgotten_and_freed() -> None:
    """With room for two programs, a third shape frees the least recently used one, which can be compiled again."""
    sharded = autoshard.compile(nn.Linear(4, 2), Mesh({"data": 2}), options=autoshard.Options(max_programs=2))
    sharded(torch.ones(2, 4))
    first = weakref.ref(sharded.programs[0].phased.lowered.graph_module)
    sharded(torch.ones(4, 4))
    second = weakref.ref(sharded.programs[1].phased.lowered.graph_module)
    sharded(torch.ones(2, 4))
    sharded(torch.ones(6, 4))
    gc.collect()
    slots = [slot for program in sharded.programs for slot in program.phased.lowered.inputs]
    assert [slot.shape for slot in slots if slot.slot.kind == InputKind.INPUT] == [(2, 4), (6, 4)]
    assert first() is not None
    assert second() is None
    torch.testing.assert_close(sharded(torch.ones(4, 4)), sharded._original[0](torch.ones(4, 4)))


def check_freed(axes: dict[str, int]) -> None:
    """Check that steps and evaluations of three lengths equal one device, and free all six programs but the last."""
    torch.manual_seed(0)
    model, reference = Chain(4, 2), Chain(4, 2)
    reference.load_state_dict(model.state_dict())
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, reference)]
    step: Any = autoshard.compile(
        model, Mesh(axes), optimizer=optimizers[0], options=autoshard.Options(max_programs=1), time_budget_s=2.0
    )
    graphs = []
    for length in (2, 4, 6):
        loss = reference(torch.ones(length, 4))
        loss.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        torch.testing.assert_close(step(torch.ones(length, 4)), loss)
        graphs.append(_graph_of(step.sharded))
    with torch.no_grad():
        for length in (2, 4, 6):
            torch.testing.assert_close(step.sharded(torch.ones(length, 4)), reference(torch.ones(length, 4)))
            graphs.append(_graph_of(step.sharded))
    gc.collect()
    assert [graph() is not None for graph in graphs] == [False] * 5 + [True]


def _graph_of(sharded: ShardedModule) -> weakref.ref[Any]:
    program = sharded.program
    assert program is not None
    return weakref.ref(program.parts[0].forward)


@pytest.mark.parametrize("axes", [{"data": 2}, {"pipeline": 2}], ids=str)
def test_forgotten_steps_and_evaluations_are_freed(axes: dict[str, int]) -> None:
    """A program dropped from the cache is freed, on data ranks and in pipeline stages."""
    check_freed(axes)


def test_what_is_made_for_a_program_goes_with_it() -> None:
    """A `PerProgram` value is made once per program and freed with it; copies of the holder start empty."""
    sharded: Any = autoshard.compile(nn.Linear(4, 2), Mesh({"data": 2}), example_inputs=(torch.ones(2, 4),))
    (executable,) = sharded._known
    other = executable.for_a_copy()
    made = PerProgram[set[int]]()
    first = made.get_or_make(executable, lambda: {1})
    assert made.get_or_make(executable, lambda: {2}) is first
    assert made.get(other) is None
    assert copy.deepcopy(made).get(executable) is None
    assert pickle.loads(pickle.dumps(made)).get(executable) is None
    made.keep(other, {3})
    kept = weakref.ref(first)
    sharded._known, sharded._last = KnownPrograms(1), None
    del first, executable
    gc.collect()
    assert kept() is None
    assert made.get(other) == {3}
