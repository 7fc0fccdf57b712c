"""Programs are kept up to a number, and what is forgotten is freed."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn

import autoshard
from autoshard import Mesh
from autoshard.ir.program import InputKind


def test_the_program_used_least_recently_is_forgotten_and_freed() -> None:
    """Of three kinds of calls with room for two, the one that was not used again is compiled anew."""
    sharded = autoshard.compile(nn.Linear(4, 2), Mesh({"data": 2}), max_programs=2)
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
