"""Public test tools: Hypothesis strategies for meshes, specs, programs and plans, and `check_plan`."""

from autoshard.testing.check import CheckReport, Comparison, check_plan
from autoshard.testing.plans import plans
from autoshard.testing.programs import DrawnProgram, programs
from autoshard.testing.strategies import meshes, shapes, specs

__all__ = [
    "CheckReport",
    "Comparison",
    "DrawnProgram",
    "check_plan",
    "meshes",
    "plans",
    "programs",
    "shapes",
    "specs",
]
