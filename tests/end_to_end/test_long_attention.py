"""A compiled step of attention takes memory linear in the sequence, under any split."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import autoshard
from autoshard import Mesh, P
from tests.models import Attention

TOKENS, FEATURES = 16384, 16
HEADS = {"heads": 2, "batch": 2, "sequence": 1}
SPLITS = {
    "heads": {"qkv.weight": P("model"), "out.weight": P(None, "model"), "input:0": P()},
    "batch": {"input:0": P("model")},
    "sequence": {"input:0": P(None, "model")},
}


def resident_growth(step: Callable[[], object]) -> int:
    """Return the growth of this process's resident memory to its peak within `step`, in bytes."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak becomes what is resident now
    before = _status("VmRSS")
    step()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None, f"Linux has {field}"
    return 1024 * int(found[1])


@pytest.mark.sample(2)
@pytest.mark.parametrize("split", SPLITS)
def test_memory_is_linear_in_the_sequence(split: str) -> None:
    """Forward and backward over 16384 tokens on two simulated ranks need less memory than 48 times the input."""
    torch.manual_seed(0)
    mesh, batch = Mesh({"model": 2}), 2 if split == "batch" else 1
    sharded = autoshard.compile(Attention(HEADS[split], FEATURES // HEADS[split]), mesh, constraints=SPLITS[split])
    short, long = (torch.randn(batch, length, FEATURES) for length in (64, TOKENS))
    sharded(short).backward()  # what is loaded once
    plan = sharded.compile_for(long)
    assert plan is not None
    (spec,) = {node.inputs[0] for name, node in plan.nodes.items() if name == "attention"}
    assert [bool(axes) for axes in spec.dims] == [split == kind for kind in ("batch", "heads", "sequence")][
        : len(spec.dims)
    ]
    growth = resident_growth(lambda: sharded(long).backward())
    values = batch * TOKENS * FEATURES * 4
    assert growth < 48 * values, f"{growth / values:.0f} times the input"
