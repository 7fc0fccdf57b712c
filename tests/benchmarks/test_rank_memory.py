"""The measurements of `tests.benchmarks.rank_memory`, on a small model."""

from __future__ import annotations

import gc
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import autoshard
from autoshard import Mesh, P
from tests.benchmarks.rank_memory import Phase, measure
from tests.runtime.processes import report, run_checks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="peaks of resident memory are read from /proc")


KEPT_BYTES = 32 * 2**20
"""Freed memory that the C library may keep beside a small model, in bytes: a fifth of one rank's half of it."""


def assert_within(phases: list[Phase]) -> None:
    excess = [phase for phase in phases if phase.peak_bytes > phase.allowed_bytes + KEPT_BYTES]
    assert not excess, "\n".join(map(str, excess))


@pytest.mark.slow
def test_no_rank_holds_the_whole_model(tmp_path: Path) -> None:
    """On two ranks, no phase from meta through steps, a checkpoint and an export takes more than its limit."""
    phases = measure("small", {"train": 2}, tmp_path)["train"]
    assert {"trace", "place", "init_weights", "step 1", "new shape", "save"} <= {phase.name for phase in phases}
    assert_within(phases)


@pytest.mark.slow
def test_no_rank_holds_the_whole_model_when_it_is_loaded(tmp_path: Path) -> None:
    """No phase takes more than its limit if two ranks load four ranks' checkpoint, or four load exported weights."""
    for phases in measure("small", {"train": 4, "resume": 2, "begin": 4}, tmp_path).values():
        assert_within(phases)


LAYERS, WIDTH = 32, 1024
"""128 MiB of weights."""

_PYTHONS_OWN_BYTES = 16 << 20
"""Memory of traces, plans and programs in bytes, larger for 32 layers than for the earlier model of one layer."""


def private_bytes() -> int:
    """Return the private resident memory of this process in bytes, without pages of files."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, "Linux says so"
    return int(found[1]) * 1024


@contextmanager
def watching() -> Iterator[list[int]]:
    """Within this context, the last entry of the yielded list is the largest private memory so far."""
    peak, ended = [private_bytes()], threading.Event()

    def watch() -> None:
        while not ended.is_set():
            peak.append(max(peak.pop(), private_bytes()))
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


def layers(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)))


def compiled(model: nn.Module) -> nn.Module:
    constraints = {"*weight": P("data"), "input:*": P("data")}
    return autoshard.compile(
        model, Mesh({"data": 2}), example_inputs=(torch.ones(2, WIDTH),), constraints=constraints, time_budget_s=2.0
    )


def check_mapped(file: Path) -> None:
    """A rank that compiles a model of memory-mapped weights copies only its shards, and holds one whole weight at
    a time."""
    compiled(layers(1))
    gc.collect()
    with torch.device("meta"):
        model = layers(LAYERS)
    model.load_state_dict(torch.load(file, mmap=True, weights_only=True), assign=True)
    before, weight_bytes = private_bytes(), 4 * WIDTH**2
    with watching() as peak:
        sharded = compiled(model)
    allowed = _PYTHONS_OWN_BYTES + 1.15 * (LAYERS * weight_bytes / 2 + weight_bytes)
    assert peak[-1] - before <= allowed, f"{peak[-1] - before} bytes of {allowed}"
    expected = torch.load(file, mmap=True, weights_only=True)
    for name, weight in sharded.state_dict().items():
        assert torch.equal(weight.full_tensor(), expected[name]), name


def test_mapped_weights_are_not_copied(tmp_path: Path) -> None:
    """On two ranks, private memory grows by the shards of memory-mapped weights, although digests read
    the whole file."""
    torch.save(layers(LAYERS).state_dict(), tmp_path / "weights.pt")
    report(run_checks({"mapped": partial(check_mapped, tmp_path / "weights.pt")}, ranks=2, deadline_s=200), "mapped")
