"""The change that a question makes before it plans again, and the interface of planning again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from autoshard.ir.kernels import Kernels
from autoshard.ir.plan import Plan
from autoshard.ir.spec import PartitionSpec
from cost_models.hardware import Cluster
from passes.planning.build_assignment import PlanningProblem
from passes.planning.restrictions import Roles

Fields = Mapping[str, Collection[object]]
"""Allowed values of recipes: name of a field of `autoshard.Recipe` → values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One thing that a question changes before it plans again. A field at its default changes nothing.

    Args:
        stage: index of the pipeline stage with the sites in `specs`.
        specs: name of a site → the spec that its value must have.
        roles: mesh axis → the role that it must have, in all stages.
        without: "recompute" or "offload"; the plan must not use it.
        fields: recipe field → its allowed values. The new plan may be for another mesh.
        memory: factor on the memory limit.
        faster: function that returns a copy of a cluster with one part faster, or None if the cluster lacks the part.
    """

    stage: int = 0
    specs: Mapping[str, PartitionSpec] = field(default_factory=dict)
    roles: Roles = field(default_factory=dict)
    without: str = ""
    fields: Fields = field(default_factory=dict)
    memory: float = 1.0
    faster: Callable[[Cluster], Cluster | None] | None = None


NO_CHANGE = Change()


class Replan(Protocol):
    """Plans a call again with one thing changed.

    There are two implementations. One is for plans that `compile` can run. The other is for prices of recipes: plans
    without specs, which predict a recipe's step under another framework's runtime.
    """

    @property
    def cluster(self) -> Cluster:
        """The hardware that the call is planned for."""
        ...

    def problems(self) -> Sequence[PlanningProblem]:
        """Return the planning problem of each stage; an empty sequence for a price of a recipe, which has no specs."""
        ...

    def missing(self, feature: str) -> str:
        """Return the reason why no recipe of the model can have a feature, or "" if a recipe may have it."""
        ...

    def kernels(self, plan: Plan) -> Kernels:
        """Return the Triton kernels that a plan runs under `backend="triton"`, or that a price of a recipe counts."""
        ...

    def __call__(self, plan: Plan, change: Change) -> Plan:
        """Return the fastest plan of the call with a change.

        Raises:
            DoesNotFitError: no plan fits in memory.
            RecipeError: the change does not apply to the model.
            NotAvailableError: the change needs an argument that the call lacks.
        """
        ...
