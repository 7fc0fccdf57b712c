"""One thing that is otherwise when a plan is made again: the unit of every question."""

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
"""Fields of `autoshard.Recipe` to the values that they may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One thing that a question changes before it plans again.

    Args:
        stage: the stage whose sites `specs` names.
        specs: sites to the spec that their value must have.
        roles: mesh axes to the role that each must have, in all stages.
        without: "recompute" or "offload", which the plan must do without.
        fields: fields of recipes to the values that they may have; the plan may then be for another mesh.
        memory: factor of the memory limit; infinite for no limit.
        faster: the cluster to its faster form.
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
        """Why no recipe of the model has a feature; "" where one may."""
        ...

    def kernels(self, plan: Plan) -> Kernels:
        """The Triton kernels that a plan is priced with, or would run with `backend="triton"`."""
        ...

    def __call__(self, plan: Plan, change: Change) -> Plan:
        """The fastest plan with a change.

        Raises:
            DoesNotFitError: none fits in memory.
            RecipeError: the model has nothing that could be changed so.
            NotAvailableError: the change needs something that the call does not have.
        """
        ...
