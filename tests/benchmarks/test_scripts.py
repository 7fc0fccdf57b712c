"""Scripts that no other test imports are not out of date."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path


def test_every_script_imports() -> None:
    """The names that scripts import exist. Collection leaves out modules without tests."""
    for path in sorted(Path(__file__).parent.glob("[!_]*.py")):
        assert import_module(f"tests.benchmarks.{path.stem}").__doc__
