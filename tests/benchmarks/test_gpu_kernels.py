"""The benchmark of kernels on a GPU can run: its cases are dry-run without one."""

from __future__ import annotations

import pytest
import torch

from cost_models.device import device
from tests.benchmarks import gpu_kernels


def test_every_case_runs_on_the_meta_device() -> None:
    """Kernels and what they are compared with give results of one shape, from 2k to 32k and heads of 64 and 128."""
    table = gpu_kernels.dry_run(device("h200"))
    names = list(table.columns[0].cells)
    assert {f"attention, head {size}, {length}" for size in (64, 128) for length in (2048, 8192, 32768)} < set(names)
    assert all(float(str(cell)) > 0 for cell in table.columns[1].cells)


def test_results_of_other_shapes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A case whose kernel computes something else is named."""
    with torch.device("meta"):
        case = next(gpu_kernels.cases())
    wrong = gpu_kernels.Case(case.name, lambda: case.ours()[0], case.plain, case.moved_bytes)
    monkeypatch.setattr(gpu_kernels, "cases", lambda: iter([wrong]))
    with pytest.raises(ValueError, match="gated gives"):
        gpu_kernels.dry_run(device("h200"))
