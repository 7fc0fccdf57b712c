"""Plan training steps in a pipeline, and calls without gradients: cut into stages, search each, predict the schedule.

The specs of a stage are searched as if all stages on its rank were like it, within the rank's memory. The stage counts
the most micro-batches in flight in the schedule (`StageLoad`). If a rank then still exceeds its memory, the limits of
its stages are lowered, and they are searched again, until the rank fits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from autoshard.errors import (
    DoesNotFitError,
    InvalidSpecError,
    NotAvailableError,
    PlanMismatchError,
    VerificationError,
)
from autoshard.ir.loss import Output, loss_among
from autoshard.ir.lowered import PhasedProgram
from autoshard.ir.pipeline_order import PipelineOrder
from autoshard.ir.plan import Plan
from autoshard.ir.program import InputKind, OutputKind, Program, describe
from autoshard.ir.request import Request
from autoshard.ir.staged import CutProgram, StagedProgram, StageProgram
from autoshard.ir.text import format_bytes, memory_limit_in_words
from autoshard.ir.verification_report import VerificationReport
from autoshard.runtime.stages.stage_messages import find_slot
from autoshard.tracing.update import append_update
from cost_models.schedule_orders import most_in_flight
from passes.driver.norm_of_plan import lacks_norm, with_norm
from passes.driver.pipelines import Pipeline
from passes.driver.planner import Planner
from passes.driver.stage_search import StageSearch, constraints_of, lowered_stage
from passes.lowering.order_pipeline import order_forward, order_pipeline
from passes.planning.build_assignment import PlanningProblem
from passes.planning.constraints import constraints_on, split_outputs
from passes.planning.cover import cover_stages
from passes.prediction.predict_pipeline import PipelinePrediction, predict_pipeline
from passes.preparation.split_stages import SplitStages
from passes.strategies.price_nodes import NodePrices
from passes.verification.verify_cut_backward import verify_cut_backward

FORWARD = "forward"
"""The name of the schedule of a call without gradients."""

NO_PROGRAMS: Mapping[int, PhasedProgram] = MappingProxyType({})
"""The empty dict from the number of a stage to its lowered program: no stage is lowered yet."""

_TRIES = 8
"""The number of searches of a stage, each within a lower limit, before an error says that the pipeline does not fit."""


@dataclass(frozen=True, slots=True)
class StagePlans:
    """Plans the stages of training steps, and of calls without gradients.

    Args:
        planner: plans and lowers single stages, and programs of calls without stages.
        pipeline: the mesh, schedule and number of stages.
        problems: a cache of planning problems, whose keys are those of `StageSearch.problems`.
    """

    planner: Planner
    pipeline: Pipeline
    problems: dict[Hashable, PlanningProblem] = field(default_factory=dict, repr=False)

    def plan(
        self,
        program: Program,
        request: Request,
        homes: Mapping[str, int] | None = None,
        *,
        before: Plan | None = None,
        kept: Mapping[int, StageProgram] | None = None,
    ) -> tuple[Plan, list[StageProgram]]:
        """Return the plan of a traced step, or of a call without gradients, and its lowered stages.

        Args:
            program: forward and backward, or a forward alone.
            request: the traced call; its update is planned with each stage.
            homes: name of a parameter that already has a stage → the stage's number.
            before: a plan of this program in the same number of stages. The program is cut at the same places, and
                searches begin with this plan.
            kept: lowered stages that stay as they are, by number, unless a rank lacks memory for them.

        Raises:
            DoesNotFitError: a rank needs more memory than its device has.
        """
        start = time.perf_counter()
        cut = self._cut(program, request, cuts=before.cuts if before else (), homes=homes)
        self._check_constraints(program, cut, request)
        order = self.order(request)
        search = self._search(cut, order, request, before)
        stages, predicted = self._fitting(search, program, kept or {})
        found = self._whole(program, cut, order, stages, predicted)
        return replace(found, search_time_s=time.perf_counter() - start), stages

    def cut(self, program: Program, plan: Plan, request: Request) -> CutProgram:
        """Return the programs of the stages of a plan, each with its update."""
        return self._cut(program, request, cuts=plan.cuts)

    def problem(self, program: Program, request: Request, plan: Plan, number: int) -> PlanningProblem:
        """Return the planning problem of stage `number` of a plan. It is built at the first call."""
        if number not in self.problems:
            cut, order = self.cut(program, plan, request), self.order(request)
            self.problems[number] = self._search(cut, order, request, None).problem(number)
        return self.problems[number]

    def lower(
        self, program: Program, plan: Plan, request: Request, lowered: Mapping[int, PhasedProgram] = NO_PROGRAMS
    ) -> tuple[StagedProgram, list[VerificationReport]]:
        """Return the lowered stages of a plan, and the proof of each stage that is lowered here.

        The order of the stages is proven elsewhere, before it runs (`verify_schedule`).

        Args:
            program, request: the arguments given to `plan`.
            lowered: programs that `plan` has lowered in this process, by number of stage.
        """
        assert plan.order is not None, "it is a plan of stages"
        cut = self.cut(program, plan, request)
        search = self._search(cut, plan.order, request, None)
        made = list[tuple[PhasedProgram, VerificationReport | None]]()
        try:
            stage_plans = [
                with_norm(own, stage) if lacks_norm(own, stage) else own
                for stage, own in zip(cut.stages, plan.stages, strict=True)
            ]
            for number, (stage, own) in enumerate(zip(cut.stages, stage_plans, strict=True)):
                lowering = replace(self.planner, load=search.load(number))
                made.append((lowered[number], None) if number in lowered else lowering.lower(stage, own))
        except PlanMismatchError as error:
            raise _of_another_step(plan) from error
        pairs = zip(made, stage_plans, strict=True)
        stages = [lowered_stage(phased, own, plan.order) for (phased, _), own in pairs]
        if self.planner.verify:
            for stage in stages:
                verify_cut_backward(stage.phased)
        reports = [report for _, report in made if report is not None]
        return _staged(cut, plan.order, stages, program), reports

    def order(self, request: Request) -> PipelineOrder:
        """Return the tasks of each pipeline rank in order.

        A task is the forward or backward of a stage and micro-batch.
        """
        pipeline = self.pipeline
        if request.update is None:
            return order_forward(pipeline.schedule, pipeline.ranks, pipeline.virtual_stages)
        return order_pipeline(pipeline.schedule, pipeline.ranks, pipeline.micro_batches, pipeline.virtual_stages)

    def _search(self, cut: CutProgram, order: PipelineOrder, request: Request, before: Plan | None) -> StageSearch:
        mesh, in_flight = self.pipeline.stage_mesh, self._in_flight(order)
        return StageSearch(self.planner, mesh, cut, order, in_flight, request, before, self.problems)

    def _in_flight(self, order: PipelineOrder) -> tuple[int, ...]:
        """Return for each pipeline rank the most micro-batches that it holds at once, summed over its stages."""
        pipeline = self.pipeline
        if not order.trains:
            return (1,) * pipeline.ranks
        return most_in_flight(
            pipeline.schedule, pipeline.ranks, pipeline.micro_batches, virtual_stages=pipeline.virtual_stages
        )

    def _cut(
        self,
        program: Program,
        request: Request,
        cuts: tuple[str, ...] = (),
        homes: Mapping[str, int] | None = None,
    ) -> CutProgram:
        """Cut a traced program into the programs of its stages, each with its part of the update.

        Args:
            cuts: names of calls, before each of which a stage begins; empty: the cuts are chosen by time.
            homes: name of a parameter that already has a stage → the stage's number.
        """
        mesh = self.pipeline.stage_mesh
        prices = NodePrices(self.planner.cluster_for(mesh), mesh)
        blocks = None if self.planner.recipe is None else self.planner.recipe.stage_layers
        cut = SplitStages(self.pipeline.stages, prices.computed_s, cuts, homes or {}, blocks)(program)
        if request.update is None:
            return cut
        return replace(cut, stages=tuple(append_update(stage, request.update, of_stage=True) for stage in cut.stages))

    def _check_constraints(self, program: Program, cut: CutProgram, request: Request) -> None:
        asked = constraints_on(program, self.planner.constraints, without_state=request.update is None)
        for pattern in asked:
            if not any(pattern in constraints_of(stage, asked) for stage in cut.stages):
                raise InvalidSpecError(
                    f"constraints[{pattern!r}] matches no parameter, buffer, input or state of any stage."
                )

    def sharded_outputs(self, program: Program) -> frozenset[str]:
        """Return the names of the model's outputs that stay split over ranks."""
        return split_outputs(program, self.planner.constraints, gather=self.planner.gather_outputs)

    def _fitting(
        self, search: StageSearch, program: Program, kept: Mapping[int, StageProgram]
    ) -> tuple[list[StageProgram], PipelinePrediction]:
        """Return the planned stages of a pipeline that fits in the memory of each rank, and the pipeline's prediction.

        Stages on ranks that exceed their memory are searched again within lower limits, at most `_TRIES` times.
        """
        cut, order = search.cut, search.order
        cluster, update = self.planner.cluster_for(self.pipeline.mesh), search.request.update
        budget = self.planner.limit_bytes(self.pipeline.mesh)
        limits: list[float | None] = [budget] * len(cut.stages)
        stages, waiting = dict(kept), [number for number in range(len(cut.stages)) if number not in kept]
        clips, needed = update is not None and update.has_norm, math.inf
        for _ in range(_TRIES):
            try:
                stages |= {number: search.stage(number, limits[number]) for number in waiting}
            except DoesNotFitError as error:
                raise self._does_not_fit(error.smallest_bytes, budget, order) from error
            found = [stages[number] for number in range(len(cut.stages))]
            staged = _staged(cut, order, found, program)
            predicted = predict_pipeline(staged, self.pipeline.mesh, cluster, clips_norm=clips)
            over = [memory.peak_bytes - budget for memory in predicted.memory]
            if max(over) <= 0:
                return found, predicted
            if predicted.whole.peak_memory_bytes >= needed:
                break
            needed = predicted.whole.peak_memory_bytes
            waiting, least = [], dict[Hashable, float]()
            for number, rank in enumerate(order.stage_ranks):
                limit, has = limits[number], found[number].plan.predicted.peak_memory_bytes
                key = search.keys[number]
                is_least = key in search.least  # a lower limit would give the same plan
                if over[rank] > 0 and not is_least:
                    less = min(has, limit or has) - max(1, over[rank])
                    least[key] = min(less, least.get(key, less))
                    waiting.append(number)
            for number in waiting:
                limits[number] = least[search.keys[number]]
            if not waiting:
                break
        raise self._does_not_fit(needed, budget, order)

    def _does_not_fit(self, needed: float, budget: float, order: PipelineOrder) -> DoesNotFitError:
        flight = max(self._in_flight(order))
        late = (
            " time_budget_s was up before the search ended: give it more time."
            if self.planner.begun()[1].has_cut
            else ""
        )
        limit = memory_limit_in_words(budget, is_given=self.planner.memory_budget is not None)
        needs = f"{format_bytes(needed)} per device or more" if needed else "more memory per device"
        return DoesNotFitError(
            f"The pipeline needs {needs}, with up to {flight} micro-batches in "
            f"flight on a rank (schedule={self.pipeline.schedule!r}). This exceeds {limit}. Use more micro-batches, "
            f"which are smaller, another schedule, or more ranks.{late}",
            smallest_bytes=int(needed),
        )

    def _whole(
        self,
        program: Program,
        cut: CutProgram,
        order: PipelineOrder,
        stages: Sequence[StageProgram],
        predicted: PipelinePrediction,
    ) -> Plan:
        plans = tuple(replace(stage.plan, predicted=own) for stage, own in zip(stages, predicted.stages, strict=True))
        crossing = {item.name for item in cut.crossings}
        nodes = program.nodes_by_name()
        return Plan(
            mesh=self.pipeline.mesh,
            program_digest=program.digest(),
            inputs={slot.name: describe(nodes[slot.node].meta["val"]) for slot in program.inputs_of(InputKind.INPUT)},
            nodes={},
            outputs={
                name: spec
                for plan in plans
                for name, spec in plan.outputs.items()
                if name.partition(" ")[2] not in crossing and not name.startswith(OutputKind.SQUARES)
            },
            parameters={name: item for plan in plans for name, item in plan.parameters.items() if name not in crossing},
            predicted=predicted.whole,
            objective=predicted.whole.step_time_s,
            lower_bound=None,
            search_time_s=0.0,
            hardware=self.planner.cluster_for(self.pipeline.mesh).name,
            memory_budget=int(self.planner.limit_bytes(self.pipeline.mesh)),
            precision=self.planner.precision,
            recipe=self.planner.recipe,
            replicated_operators=tuple(dict.fromkeys(item for plan in plans for item in plan.replicated_operators)),
            operators=cover_stages((plan.operators for plan in plans), self.pipeline.ranks),
            was_interrupted=any(plan.was_interrupted for plan in plans),
            was_cut=any(plan.was_cut for plan in plans),
            stages=plans,
            micro_batches=order.micro_batches,
            order=order,
            schedule=self.pipeline.schedule if order.trains else FORWARD,
            cuts=cut.cuts,
        )


def check_fits(plan: Plan, program: Program, pipeline: Pipeline) -> None:
    """Raise `PlanMismatchError` if a plan with stages is for another program or mesh."""
    assert plan.order is not None, "it is a plan of stages"
    if plan.mesh != pipeline.mesh:
        raise PlanMismatchError(
            f"The plan's stages are for {plan.mesh}, and the model runs on {pipeline.mesh}. Plan again for that "
            "mesh, or leave plan= out."
        )
    if plan.program_digest != program.digest():
        raise _of_another_step(plan)


def _of_another_step(plan: Plan) -> PlanMismatchError:
    return PlanMismatchError(
        f"The plan's stages are of another step: of inputs {dict(plan.inputs)}, or of another model or optimizer. "
        "Call with what it was planned for, or plan again."
    )


def check_stays(program: Program) -> None:
    """Raise `NotAvailableError` if a program changes buffers or attributes, or branches on a parameter's value.

    Stages on other ranks would not see the changed values.
    """
    buffers = [slot.name for slot in program.outputs_of(OutputKind.BUFFER_UPDATE)]
    if buffers:
        raise NotAvailableError(
            f"A call changes buffer {buffers[0]!r}, and stages of a pipeline do not share buffers that change. Use a "
            "mesh without the axis 'pipeline', or put the module into evaluation mode."
        )
    if program.kept:
        raise NotAvailableError(
            f"A call leaves a tensor in attribute {next(iter(program.kept.values()))!r}; under an axis 'pipeline' only "
            "the loss is handed out. Leave the attribute out, or use a mesh without the axis 'pipeline'."
        )
    if any(slot.kind is InputKind.PARAMETER for slot in program.read_by_guards()):
        raise NotAvailableError(
            "The model branches on the value of a parameter, which only the ranks of its stage hold. Use a mesh "
            "without the axis 'pipeline'."
        )


def _staged(cut: CutProgram, order: PipelineOrder, stages: Sequence[StageProgram], program: Program) -> StagedProgram:
    outputs = program.outputs_of(OutputKind.OUTPUT)
    results = [slot.name for slot in outputs]
    if order.trains:
        values = {slot.name: program.nodes_by_name()[slot.node].meta["val"] for slot in outputs}
        tangents = {slot.name for slot in program.inputs_of(InputKind.TANGENT)}
        shapes = [Output(name, tuple(value.shape), value.dtype) for name, value in values.items()]
        results = [loss_among(shapes, tangents).name]
    made = {slot.name: number for number, stage in enumerate(cut.stages) for slot in stage.outputs}
    staged = StagedProgram(tuple(stages), cut.crossings, order, {name: made[name] for name in results})
    _check_crossings(staged)
    return staged


def _check_crossings(staged: StagedProgram) -> None:
    """Raise `VerificationError` if a value that is sent between stages is inconsistent.

    Maker and reader must agree in shape and dtype. Values of the forward go to later stages, gradients to earlier
    stages.
    """
    for crossing in staged.crossings:
        made = find_slot(staged.stages[crossing.maker].phased.lowered.outputs, crossing.name)
        taken = find_slot(staged.stages[crossing.reader].phased.lowered.inputs, crossing.name)
        if (made.shape, made.dtype) != (taken.shape, taken.dtype):
            raise VerificationError(f"{crossing} is made as {made}, and read as {taken}.")
        if crossing.is_forward != (crossing.maker < crossing.reader):
            raise VerificationError(f"{crossing} goes against the order of the stages.")
