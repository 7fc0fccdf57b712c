"""Every kernel compiles for sm_80 and sm_90 on a machine without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from autoshard.errors import KernelError
from autoshard.kernels.ahead import compile_ahead
from autoshard.kernels.registry import KERNELS

SCRIPT = Path(__file__).with_name("compile_ahead.py")
ROOT = SCRIPT.parents[2]
# Registers of a thread, and shared memory of a program on sm_80.
MAX_REGISTERS, MAX_SHARED_BYTES = 255, 166_912
# Two registers: the ptxas of triton 3.6 spills those where that of 3.9 spills none.
MAX_SPILLED_BYTES = 8


def _compile(columns: str) -> list[dict[str, int | str]]:
    """The script's rows, from a process in which kernels are not interpreted."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-W", "error", str(SCRIPT), "80,90", columns]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout)


def _check(rows: list[dict[str, int | str]], record: Callable[[str, object], None]) -> None:
    for row in rows:
        record(f"{row['kernel']}[{row['columns']}] sm_{row['capability']}", json.dumps(row))
        assert row["registers"] <= MAX_REGISTERS, row
        assert row["shared_bytes"] <= MAX_SHARED_BYTES, row
        # Backwards of norms hold five arrays of a row; they spill beyond 8192 columns.
        assert row["spilled_bytes"] <= MAX_SPILLED_BYTES or row["columns"] > 8192, row
    kernels = {kernel.specimens[0].name for entry in KERNELS.values() for kernel in entry}
    assert {row["kernel"] for row in rows} == kernels
    assert {row["capability"] for row in rows} == {80, 90}


def test_compiles_almost_without_spills(record_property: Callable[[str, object], None]) -> None:
    """At 4096 columns every kernel compiles for both architectures and spills next to nothing."""
    _check(_compile("4096"), record_property)


@pytest.mark.slow
def test_compiles_at_every_width(record_property: Callable[[str, object], None]) -> None:
    """Every kernel compiles for short and the longest rows too; its resources are recorded."""
    _check(_compile("all"), record_property)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted where there is a GPU")
def test_interpreted_kernels_cannot_be_compiled() -> None:
    """Compiling in a process that loaded kernels for the interpreter is refused with the reason."""
    specimen = next(iter(KERNELS.values()))[0].specimens[0]
    with pytest.raises(KernelError, match="was loaded for the interpreter"):
        compile_ahead(specimen, 90)
