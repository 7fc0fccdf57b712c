"""Search the specs of each stage of a pipeline within a memory limit. Alike stages are searched once."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from autoshard.errors import DoesNotFitError
from autoshard.ir.lowered import PhasedProgram
from autoshard.ir.mesh import Mesh
from autoshard.ir.pipeline_order import PipelineOrder
from autoshard.ir.plan import Plan
from autoshard.ir.program import Program
from autoshard.ir.request import Request
from autoshard.ir.spec import PartitionSpec
from autoshard.ir.staged import CutProgram, StageProgram
from passes.driver.alike_stages import rename_plan, rename_slots, stage_key
from passes.driver.expand_plan import expand_plan
from passes.driver.leave_out_units import leave_out_units
from passes.driver.planner import Planner
from passes.lowering.lower_program import prepare
from passes.lowering.order import Moment, run_at
from passes.memory.stage_load import StageLoad
from passes.planning.build_assignment import PlanningProblem
from passes.planning.constraints import matching, whole_outputs
from passes.strategies.repeated import NotAlikeError

_LOGGER = logging.getLogger(__name__)

_OF_MODEL = "output:"

_MARGIN = 1
"""The `margin` of `leave_out_units` for a pipeline stage."""


@dataclass(frozen=True, slots=True)
class StageSearch:
    """The search of all stages of one cut of a program.

    Args:
        mesh: the mesh of each stage.
        in_flight: for each rank, the most micro-batches that it holds.
        before: a plan of the call in the same number of stages, with which searches begin.
        problems: a cache of planning problems for one program and its cuts. A key is the key or the number of a stage,
            or (key of a stage, "short") for a program without inner blocks.
        found: results by key and memory limit: the number of the searched stage, and its plan and program.
        least: for the key of each stage without a plan within its limit, the bytes of the smallest plan.
        keys: for each stage, a key that alike stages share, see `stage_key`.
    """

    planner: Planner
    mesh: Mesh
    cut: CutProgram
    order: PipelineOrder
    in_flight: Sequence[int]
    request: Request
    before: Plan | None
    problems: dict[Hashable, PlanningProblem]
    found: dict[tuple[Hashable, float | None], tuple[int, StageProgram]] = field(default_factory=dict)
    least: dict[Hashable, int] = field(default_factory=dict)
    keys: list[Hashable] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.keys.extend(self._key(number) for number in range(len(self.cut.stages)))

    def stage(self, number: int, limit: float | None) -> StageProgram:
        """Return the plan and program of stage `number` within `limit` bytes on its rank.

        If `limit` is None, the memory limit of `self.planner` holds.

        If nothing fits in the limit, the stage is searched within the bytes of the smallest plan that is known. A stage
        like a searched stage shares that stage's graphs, and has slots with its own names.

        Raises:
            DoesNotFitError: no plan of the stage fits, and no larger plan is known.
        """
        key = self.keys[number], limit
        if key not in self.found:
            self.found[key] = number, self._search(number, limit)
        first, made = self.found[key]
        if first == number:
            return made
        alike, own = self.cut.stages[first], self.cut.stages[number]
        return StageProgram(
            rename_slots(made.phased, alike, own), rename_plan(made.plan, alike, own), is_of_equal_stage=True
        )

    def alike(self, number: int) -> Sequence[int]:
        """Return the numbers of all stages that are like stage `number`, including `number` itself."""
        return [other for other, key in enumerate(self.keys) if key == self.keys[number]]

    def problem(self, number: int) -> PlanningProblem:
        """Return the planning problem of stage `number` with all its blocks."""
        return self._planner_of_stage(number, None).problem(self.cut.stages[number], self.mesh, {})

    def _key(self, number: int) -> Hashable:
        """Return the key that alike stages share.

        If a question changes this stage alone, the key is the stage's number, so that no other stage shares its plan.
        """
        stage, change = self.cut.stages[number], self.planner.change
        if change.specs and change.stage == number:
            return number
        constraints, placed = self._constraints(stage), self.request.placed

        def requirements(name: str) -> Hashable:
            specs = [spec for pattern, spec in constraints.items() if fnmatchcase(name, pattern)]
            return tuple(map(repr, specs)), repr(placed.get(name))

        return stage_key(stage, requirements)

    def _constraints(self, stage: Program) -> dict[str, PartitionSpec]:
        found = whole_outputs(stage, self.planner.constraints, gather=self.planner.gather_outputs)
        whole = {name: PartitionSpec() for name in found if name.startswith(_OF_MODEL)}
        return {**constraints_of(stage, self.planner.constraints), **whole}

    def _planner_of_stage(self, number: int, limit: float | None) -> Planner:
        """Return the planner that searches stage `number` within `limit` bytes on the stage's rank.

        If `limit` is None, the planner keeps the memory limit of `self.planner`.
        """
        change = self.planner.change
        if change.stage != number:
            change = replace(change, specs={})
        return replace(
            self.planner,
            fixed=None,
            gather_outputs=False,  # values that cross stages are no outputs of the model
            constraints=self._constraints(self.cut.stages[number]),
            recipe=self.planner.recipe and self.planner.recipe.of_stage,
            memory_budget=self.planner.memory_budget if limit is None else int(limit),
            change=change if limit is None else replace(change, memory=1.0),
            load=self.load(number),
        )

    def load(self, number: int) -> StageLoad:
        """Return the load under which a stage is planned.

        Alike stages share a plan. So the load has the most stages, and the most micro-batches in flight, of all ranks
        with an alike stage.
        """
        ranks = {self.order.stage_ranks[other] for other in self.alike(number)}
        stages = max(self.order.stage_ranks.count(rank) for rank in ranks)
        return StageLoad(stages, max(self.in_flight[rank] for rank in ranks))

    def _search(self, number: int, limit: float | None) -> StageProgram:
        """Return the plan and program of stage `number` within `limit` bytes on its rank.

        If no plan fits, the limit is raised to the bytes of the smallest known plan, and these bytes go to `least`.
        """
        try:
            return self._search_within(number, limit)
        except DoesNotFitError as error:
            if limit is None or error.smallest_bytes <= limit:  # no larger plan is known
                raise
            self.least[self.keys[number]] = error.smallest_bytes
            return self._search_within(number, error.smallest_bytes)

    def _search_within(self, number: int, limit: float | None) -> StageProgram:
        stage, planner = self.cut.stages[number], self._planner_of_stage(number, limit)
        short = None
        if self.before is None and self.keys[number] != number:
            short = leave_out_units(stage, _MARGIN)
        if short is not None:
            try:
                plan = self._search_program(planner, short, (self.keys[number], "short"), None)[0]
                plan = expand_plan(plan, prepare(short), prepare(stage))
                return lowered_stage(planner.lower(stage, plan)[0], plan, self.order)
            except NotAlikeError as error:
                _LOGGER.debug("stage %d is planned with all its blocks: %s", number, error)
        before = None if self.before is None else self.before.stages[number]
        plan, phased = self._search_program(planner, stage, self.keys[number], before)
        return lowered_stage(planner.lower(stage, plan, phased)[0], plan, self.order)

    def _search_program(
        self, planner: Planner, program: Program, key: Hashable, before: Plan | None
    ) -> tuple[Plan, PhasedProgram | None]:
        if key not in self.problems:
            self.problems[key] = planner.problem(program, self.mesh, self.request.placed)
        found = planner.search_and_lower(program, self.mesh, self.request.placed, before, self.problems[key])
        return found.plan, found.phased


def lowered_stage(phased: PhasedProgram, plan: Plan, order: PipelineOrder) -> StageProgram:
    """Return a stage from its lowered program and plan.

    If the order has separate tasks for gradients of inputs and of weights, the backward is cut in two.
    """
    return StageProgram(run_at(Moment.STAGE, phased) if order.cuts_backwards else phased, plan)


def constraints_of(stage: Program, constraints: Mapping[str, PartitionSpec]) -> dict[str, PartitionSpec]:
    """Return the constraints that match an input, output, parameter or state of a stage."""
    return {pattern: spec for pattern, spec in constraints.items() if matching(stage, pattern)}
