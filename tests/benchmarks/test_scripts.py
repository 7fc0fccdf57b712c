"""Scripts that no other test imports."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path


def test_every_script_imports() -> None:
    """Each script of benchmarks can be imported and has a docstring."""
    for path in sorted(Path(__file__).parent.glob("[!_]*.py")):
        assert import_module(f"tests.benchmarks.{path.stem}").__doc__
