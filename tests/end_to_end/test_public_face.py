"""`import autoshard` needs no optional package, and missing names raise the usual errors."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autoshard
from autoshard import P
from autoshard.testing import meshes, plans, programs, specs

_STEP = """
import torch
model, inputs = torch.nn.Linear(4, 4), (torch.ones(4, 4),)
mesh = autoshard.Mesh({"data": 2})
"""
_CHECK = "print(autoshard.testing.check_plan(model, mesh, inputs, plan=None, steps=1))"
_WITHOUT_HYPOTHESIS = "import sys\nsys.modules['hypothesis'] = None\n"


def _run(code: str) -> str:
    """Return the output of code that runs in another Python process."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_an_import_brings_testing_without_its_libraries() -> None:
    """`import autoshard` imports neither Hypothesis nor pytest, and `autoshard.testing` is available."""
    code = "import sys, autoshard\nprint([name for name in ('hypothesis', 'pytest') if name in sys.modules])\n"
    assert _run(f"{code}{_STEP}{_CHECK}").splitlines()[0] == "[]"


def test_plans_are_checked_without_hypothesis() -> None:
    """Without Hypothesis, `check_plan` works, and drawing functions raise an error that names the package."""
    printed = _run(f"{_WITHOUT_HYPOTHESIS}import autoshard\n{_STEP}{_CHECK}")
    assert "equal one device" in printed
    code = "import autoshard\n" + "".join(
        f"try:\n    {line}\nexcept autoshard.NotAvailableError as error:\n    print(error)\n"
        for line in ("autoshard.testing.plans", "from autoshard.testing import meshes")
    )
    lines = _run(f"{_WITHOUT_HYPOTHESIS}{code}").splitlines()
    for name, line in zip(("plans", "meshes"), lines, strict=True):
        assert line.startswith(f"autoshard.testing.{name} needs Hypothesis, which is not installed: pip install")


def test_names_that_are_not_there_are_refused_as_ever() -> None:
    """A missing name raises `AttributeError`, and `getattr` with a default returns the default."""
    for module in (autoshard, autoshard.testing):
        with pytest.raises(AttributeError, match=rf"module '{module.__name__}' has no attribute 'nothing'"):
            getattr(module, "nothing")  # noqa: B009
    assert getattr(autoshard, "nothing", None) is None


@given(st.data())
@settings(max_examples=3)
def test_strategies_draw_without_arguments(data: st.DataObject) -> None:
    """`meshes`, `specs` and `programs` draw without arguments, and `plans` draws for a program and a mesh."""
    mesh = data.draw(meshes())
    assert isinstance(data.draw(specs()), autoshard.PartitionSpec)
    assert data.draw(specs(mesh, 0, reductions=())) == P()
    program = data.draw(programs())
    assert data.draw(plans(program, mesh)).mesh == mesh
