"""Public test tools: `check_plan`, a mesh of slow links, and Hypothesis strategies for programs, meshes and plans.

The Hypothesis strategies are available if Hypothesis is installed.
"""

from importlib.util import find_spec
from typing import NoReturn

from autoshard.errors import NotAvailableError
from autoshard.testing.calls import check_calls
from autoshard.testing.check import check_plan
from autoshard.testing.delayed_gloo import Link, Transfer, delayed_mesh, record_transfers
from autoshard.testing.report import CheckReport, Comparison
from autoshard.testing.whole_step import WholeStep

if find_spec("hypothesis") is not None:
    from autoshard.testing.plans import plans, traced_call
    from autoshard.testing.programs import DrawnProgram, programs
    from autoshard.testing.strategies import clusters, meshes, schedules, shapes, specs

__all__ = [
    "CheckReport",
    "Comparison",
    "DrawnProgram",
    "Link",
    "Transfer",
    "WholeStep",
    "check_calls",
    "check_plan",
    "clusters",
    "delayed_mesh",
    "meshes",
    "plans",
    "programs",
    "record_transfers",
    "schedules",
    "shapes",
    "specs",
    "traced_call",
]


def __getattr__(name: str) -> NoReturn:
    """Raise NotAvailableError if a name needs Hypothesis, which is not installed; else AttributeError."""
    if name in __all__:
        raise NotAvailableError(
            f"autoshard.testing.{name} needs Hypothesis, which is not installed: pip install hypothesis."
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
