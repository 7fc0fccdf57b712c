"""Memory that a step frees is reused by the next, as page faults of another process show."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autoshard.runtime.freed_memory import keep_freed_memory

_SCRIPT = Path(__file__).parent / "page_faults.py"


def _faults_of_a_step() -> float:
    others = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    paths = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(_SCRIPT.parents[2])}
    command = [sys.executable, str(_SCRIPT)]
    found = subprocess.run(command, env=others | paths, capture_output=True, text=True, check=True)
    return float(found.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="other C libraries than glibc are left alone")
def test_a_step_takes_its_memory_from_the_one_before() -> None:
    """A step causes fewer than 300 page faults; with the C library's defaults there are 7,000."""
    assert _faults_of_a_step() < 300


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_the_users_own_setting_stays(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """If the environment sets the C library's trimming, `keep_freed_memory` changes nothing."""
    monkeypatch.setenv(name, "glibc.malloc.trim_threshold=131072" if name == "GLIBC_TUNABLES" else "131072")
    assert not keep_freed_memory()
