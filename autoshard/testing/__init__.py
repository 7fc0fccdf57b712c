"""Public test tools: `check_plan`, and strategies for programs, meshes, specs, plans, schedules and clusters."""

from autoshard.testing.calls import check_calls
from autoshard.testing.check import check_plan
from autoshard.testing.plans import plans, traced_call
from autoshard.testing.programs import DrawnProgram, programs
from autoshard.testing.report import CheckReport, Comparison
from autoshard.testing.strategies import clusters, meshes, schedules, shapes, specs
from autoshard.testing.whole_step import WholeStep

__all__ = [
    "CheckReport",
    "Comparison",
    "DrawnProgram",
    "WholeStep",
    "check_calls",
    "check_plan",
    "clusters",
    "meshes",
    "plans",
    "programs",
    "schedules",
    "shapes",
    "specs",
    "traced_call",
]
