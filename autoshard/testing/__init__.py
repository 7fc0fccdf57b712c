"""Public test tools: Hypothesis strategies for meshes, specs, programs and plans, and `check_plan`."""

from autoshard.testing.calls import check_calls
from autoshard.testing.check import check_plan
from autoshard.testing.plans import plans
from autoshard.testing.programs import DrawnProgram, programs
from autoshard.testing.report import CheckReport, Comparison
from autoshard.testing.strategies import meshes, shapes, specs
from autoshard.testing.whole_step import WholeStep

__all__ = [
    "CheckReport",
    "Comparison",
    "DrawnProgram",
    "WholeStep",
    "check_calls",
    "check_plan",
    "meshes",
    "plans",
    "programs",
    "shapes",
    "specs",
]
