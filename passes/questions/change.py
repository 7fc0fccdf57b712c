"""One change to a plan's problem, the unit of every question."""

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
"""Fields of `autoshard.Recipe` to their allowed values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One thing that a question changes before it plans.

    Args:
        stage: the stage of the sites in `specs`.
        specs: sites to the spec that their value must have.
        roles: mesh axes to the role that each must have, in all stages.
        without: "recompute" or "offload", which the plan must not use.
        fields: recipe fields to their allowed values; the plan may then be for another mesh.
        memory: factor of the memory limit; infinite for no limit.
        faster: maps the cluster to its faster form.
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
    """Plans a call again with one thing changed: with stages or without, or by the price of a recipe."""

    @property
    def cluster(self) -> Cluster:
        """The hardware of the plan."""
        ...

    def problems(self) -> Sequence[PlanningProblem]:
        """The planning problem of each stage; none where a plan is the price of a recipe."""
        ...

    def missing(self, feature: str) -> str:
        """Reason why no recipe of the model has a feature; "" if some recipe may have it."""
        ...

    def kernels(self, plan: Plan) -> Kernels:
        """The Triton kernels of a plan's price, or of the plan under `backend="triton"`."""
        ...

    def __call__(self, plan: Plan, change: Change) -> Plan:
        """Find the fastest plan with a change.

        Raises:
            DoesNotFitError: no plan fits in memory.
            RecipeError: the change does not apply to the model.
            NotAvailableError: the change needs an argument that the call lacks.
        """
        ...
