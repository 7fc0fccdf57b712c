"""Every kernel compiles for GPUs on a machine without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from autoshard.errors import KernelError
from tests.kernels.ahead import ARCHITECTURES, TYPICAL_SIZES, compile_ahead, specimens

SCRIPT = Path(__file__).with_name("compile_ahead.py")
ROOT = SCRIPT.parents[2]
# Registers of a thread, and shared memory of a program.
MAX_REGISTERS = {"sm_80": 255, "sm_90": 255, "gfx942": 512}
MAX_SHARED_BYTES = {"sm_80": 166_912, "sm_90": 232_448, "gfx942": 65_536}
# Two registers: the ptxas of triton 3.6 spills those where that of 3.9 spills none.
MAX_SPILLED_BYTES = 8


def _compile(architectures: str, sizes: str) -> list[dict[str, Any]]:
    """The script's rows, from a process in which kernels are not interpreted."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-W", "error", str(SCRIPT), architectures, sizes]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout)


def _check(rows: list[dict[str, Any]], architectures: str, record: Callable[[str, object], None]) -> None:
    for row in rows:
        record(f"{row['kernel']}[{row['size']}] {row['architecture']}", json.dumps(row))
        assert row["registers"] <= MAX_REGISTERS[row["architecture"]], row
        assert row["shared_bytes"] <= MAX_SHARED_BYTES[row["architecture"]], row
        assert row["spilled_bytes"] <= MAX_SPILLED_BYTES or row["size"] not in TYPICAL_SIZES, row
    for architecture in architectures.split(","):
        compiled = {row["kernel"] for row in rows if row["architecture"] == architecture}
        assert compiled == {specimen.name for specimen in specimens()}


@pytest.mark.sample(1)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiles_almost_without_spills(architecture: str, record_property: Callable[[str, object], None]) -> None:
    """At the usual sizes every kernel compiles for an A100, an H100 and an MI300, and spills next to nothing."""
    _check(_compile(architecture, "typical"), architecture, record_property)


@pytest.mark.slow
def test_sizes_of_one_compile() -> None:
    """A call may have one row, one query, one class: every kernel compiles with these as constants."""
    compiled = {row["kernel"] for row in _compile("sm_90", "ones")}
    assert compiled == {specimen.name for specimen in specimens()}


@pytest.mark.slow
def test_compiles_at_every_size(record_property: Callable[[str, object], None]) -> None:
    """Every kernel compiles for short and the longest rows too; its resources are recorded."""
    every = ",".join(ARCHITECTURES)
    _check(_compile(every, "all"), every, record_property)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted where there is a GPU")
def test_interpreted_kernels_cannot_be_compiled() -> None:
    """Compiling in a process that loaded kernels for the interpreter is refused with the reason."""
    with pytest.raises(KernelError, match="was loaded for the interpreter"):
        compile_ahead(specimens()[0], "sm_90")
