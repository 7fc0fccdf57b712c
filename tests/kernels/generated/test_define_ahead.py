"""The generated kernels of models compile for GPUs on a machine without one, and do not spill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.ahead import ARCHITECTURES

SCRIPT = Path(__file__).with_name("compile_generated.py")
ROOT = SCRIPT.parents[3]
FAMILIES = ("gpt", "llama", "mixture", "vit", "encoder-decoder", "block")


def _compile(architectures: str, families: str) -> list[dict[str, Any]]:
    """The script's rows, from a process in which kernels are not interpreted."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-W", "error", str(SCRIPT), architectures, families]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout)


def _check(rows: list[dict[str, Any]], families: tuple[str, ...], record: Callable[[str, object], None]) -> None:
    for row in rows:
        record(f"{row['kernel']} {row['architecture']}", json.dumps(row))
        assert row["spilled_bytes"] == 0, row
    assert {row["size"] for row in rows} == set(families)


@pytest.mark.slow
def test_compiles_without_spills(record_property: Callable[[str, object], None]) -> None:
    """A mixture of experts' kernels, with sums and conversions, for an H100."""
    _check(_compile("sm_90", "mixture"), ("mixture",), record_property)


@pytest.mark.slow
def test_five_models_compile_everywhere(record_property: Callable[[str, object], None]) -> None:
    """Five families, and a block of Llama 3 8B in its own size, for an A100, an H100 and an MI300."""
    _check(_compile(",".join(ARCHITECTURES), ",".join(FAMILIES)), FAMILIES, record_property)
