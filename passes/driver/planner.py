"""The planner: trace a call, find its plan, lower the plan to a program of the ranks, and verify the program.

`Planner` implements the runtime's protocol `Compiler`, and also makes the plans of `autoshard.plan`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import Any, TypeVar

import torch
from torch import nn

from autoshard import tracing
from autoshard.arguments import check_has_loss, check_tensors
from autoshard.call import LossFunction
from autoshard.cluster import distinct_meshes, local_cluster
from autoshard.errors import AutoshardError, DoesNotFitError, PlanMismatchError, TraceError
from autoshard.ir.fingerprint import fingerprint
from autoshard.ir.initialisation import Initialisation
from autoshard.ir.lowered import PhasedProgram
from autoshard.ir.mesh import Mesh
from autoshard.ir.outputs import Outputs
from autoshard.ir.plan import Plan
from autoshard.ir.program import OutputKind, Program
from autoshard.ir.recipe import Recipe
from autoshard.ir.request import CompiledProgram, Request
from autoshard.ir.spec import PartitionSpec
from autoshard.ir.verification_report import VerificationReport
from autoshard.kernels.tuning_switch import VARIABLE, folder_identity
from autoshard.runtime.engine import Engine
from cost_models.hardware import Cluster
from cost_models.memory import room_bytes
from passes.driver.expand_plan import expand_for, expand_plan
from passes.driver.fixed_plan import check_plan_fits, check_same_parameters, has_more_outputs, refuse_unscaled
from passes.driver.make_together import make_together
from passes.driver.plan_and_lower import (
    DearMeshError,
    bounded_problem,
    plan_and_lower,
    plan_program,
    planning_problem,
)
from passes.driver.plan_of_choice import LoweredPlan
from passes.driver.plan_options import PlanOptions
from passes.driver.progress import interruptible, search_bar
from passes.driver.traces import Traces, trace_call
from passes.lowering.lower_program import lower_program, prepare, prepare_for
from passes.lowering.lowering_options import LoweringOptions
from passes.memory.stage_load import ONE_STAGE, StageLoad
from passes.planning.baselines import least_baselines
from passes.planning.build_assignment import PlanningProblem
from passes.planning.constraints import constraints_on, split_outputs, whole_outputs
from passes.planning.recipe_meshes import names_axes_of
from passes.questions.change import NO_CHANGE, Change
from passes.solver.search_control import Ceiling, SearchControl, SearchStopped
from passes.strategies.repeated import NotAlikeError
from passes.verification.verify_passes import verifies_each_pass, verify_pass
from passes.verification.verify_phases import verify_phases
from passes.verification.verify_preparation import verify_preparation
from passes.verification.verify_program import verify_program
from passes.verification.weigh_step import weigh_step

_LOGGER = logging.getLogger(__name__)
_FOLDER = f"measured block sizes ({VARIABLE} names one folder that all ranks see, or none on any)"

_Made = TypeVar("_Made")

_MARGINS = (2, 3)
"""Numbers of units that stay at each end of a run of equal blocks, in addition to one unit on each side of the gap.

They are tried in this order. End units may differ from inner units, so many models fail with the margin 1. The first
block of Mamba-2 reads an embedding of another type, and Llama-3's first block fetches the embedding from the host. The
last block of T5 and of Whisper adds its gradient of the positions to no other gradient.
"""


@dataclass(frozen=True, slots=True)
class Planner:
    """Traces, plans, lowers and verifies calls with the user's arguments of `compile`, as the runtime's `Compiler`.

    Args:
        cluster: the hardware of the prices; None: this machine.
        fixed: the plan that training calls must use.
        made: a finished plan, for calls of its program on its mesh.
        before: a plan that searches begin with. If this plan fits, the result is no slower.
        precision: the type of computation if the model's parameters are wider; None: the model's own types.
        traced: the program of training calls, if it is traced already.
        traces: a store of programs for all candidates of one call of `plan`; None: each call is traced.
        state_ratio: bytes of optimizer state per byte of parameters, for programs without the state.
        has_update: whether the update of an optimizer is traced. Constraints may then name its state.
        scales_loss: whether training steps scale the loss, so that calls for a loss may have gradients in float16.
        micro_batches: number of micro-batches in a training step.
        load: number of stages and of micro-batches in flight on a pipeline rank.
        with_kernels: whether Triton kernels replace operators, in programs and predictions.
        for_compiler: whether a compiler fuses programs. Then `with_kernels` holds for predictions, not for programs.
        with_native: whether torch's fused kernels run semantic operators; otherwise their definitions run.
        cuda_graph: whether predictions are for steps launched from CUDA graphs.
        recipe: restricts the search; None: no restriction.
        change: the change that a question makes (`passes.questions.change`).
        gather_outputs: whether outputs are made whole on every rank, except constrained outputs.
        progress: whether searches show their progress, see `search_bar`.
        ceiling: the time limit of several searches together; None: each search has its own limit. `begun` sets it.
        margins: the values of `margin` that `trace_with_gaps` may get, in the order tried (`_MARGINS`). A value is
            removed if the units beside its gap are not alike.
        others: see `compile`.
    """

    cluster: Cluster | None = None
    fixed: Plan | None = None
    made: Plan | None = None
    before: Plan | None = None
    traced: Program | None = None
    traces: Traces | None = None
    loss_fn: LossFunction | None = None
    precision: str | None = None
    constraints: Mapping[str, PartitionSpec] = field(default_factory=dict)
    memory_budget: int | None = None
    state_ratio: float = 0.0
    has_update: bool = False
    scales_loss: bool = False
    micro_batches: int = 1
    load: StageLoad = ONE_STAGE
    strict: bool = False
    verify: bool = True
    time_budget_s: float = 60.0
    with_kernels: bool = False
    for_compiler: bool = False
    with_native: bool = True
    cuda_graph: bool = False
    reduce_dtype: torch.dtype | None = None
    recipe: Recipe | None = None
    change: Change = NO_CHANGE
    gather_outputs: bool = False
    progress: bool | None = False
    ceiling: Ceiling | None = None
    margins: list[int] = field(default_factory=lambda: list(_MARGINS), repr=False)

    def __call__(self, request: Request, engine: Engine) -> CompiledProgram:
        """Return the compiled program of a call. The first rank plans for all ranks."""
        start = time.perf_counter()
        program = make_together(
            engine, "tracing", lambda: self.trace(request), lambda made: {"traced program": fingerprint(made)}
        )
        found = fingerprint(program)
        known = next((item for item in request.known if item.fingerprint == found), None)
        if known is not None:
            return replace(known, python=program.python)
        # Constraints on the model's outputs do not apply to gradients that are returned instead.
        planner = replace(self, gather_outputs=request.outputs is Outputs.WHOLE or bool(request.derivatives))
        free = planner._free() if request.derivatives else planner
        chosen = engine.share(lambda: free._plan_for(program, request, engine.mesh))
        phased = make_together(
            engine,
            "lowering",
            lambda: free.lower(program, chosen)[0],
            lambda made: {"compiled program": made.digest()},
        )
        if self.with_kernels:
            make_together(engine, "block sizes", folder_identity, lambda folder: {_FOLDER: folder})
        sharded_outputs = split_outputs(program, free.constraints, gather=free.gather_outputs)
        _LOGGER.info(
            "compiled %s for %s in %.1f s, predicted step time %.3g s",
            request.signature,
            engine.mesh,
            time.perf_counter() - start,
            chosen.predicted.step_time_s,
        )
        weights = weigh_step(program, replace(self, traced=None).trace, request) if self.micro_batches > 1 else None
        return CompiledProgram(phased, chosen, sharded_outputs, request.update, found, program.python, weights)

    def record_initialisation(
        self, model: nn.Module, device: torch.device, init_fn: Callable[[nn.Module], Any] | None
    ) -> Initialisation:
        """Record how a model initialises its tensors, see `tracing.record_initialisation`."""
        return tracing.record_initialisation(model, device, init_fn)

    def guards_hold(self, program: Program, inputs: Sequence[torch.Tensor], state: Mapping[str, torch.Tensor]) -> bool:
        """Whether a program, traced for other inputs and state, is also right for `inputs` and `state`."""
        return tracing.check_guards(program, inputs, state)

    def trace(self, request: Request) -> Program:
        """Return the traced program of a call.

        Raises:
            NotAvailableError: gradients in float16 without a training step.
            TraceError: the call cannot be captured, has an input without elements, or is a step without a loss.
        """
        if self.traces is not None:
            program = self.traces.once(request, None, partial(replace(self, traces=None).trace, request))
            assert program is not None, "a call has a program"
            return program
        check_tensors(request.args, request.kwargs)
        if request.grad and not (self.scales_loss and request.outputs is Outputs.LOSS):
            refuse_unscaled(self.precision)
        if self.traced is not None and request.grad and not request.all_tangents:
            return self.traced
        program = trace_call(request, self.loss_fn, self.precision)
        if request.outputs is Outputs.LOSS and self.fixed is not None and has_more_outputs(self.fixed, program):
            program = trace_call(replace(request, outputs=Outputs.AS_PLANNED), self.loss_fn, self.precision)
        if request.update is not None:
            check_has_loss(program)
        return program

    def trace_with_gaps(self, request: Request, margin: int) -> Program | None:
        """Return the program without inner blocks, or None if all blocks stay. `leave_out_blocks` explains `margin`."""
        if self.traces is not None:
            return self.traces.once(
                request, margin, partial(replace(self, traces=None).trace_with_gaps, request, margin)
            )
        short = tracing.leave_out_blocks(request.model, margin)
        if short is None:
            return None
        try:
            program = self.trace(replace(request, model=short.model))
        except TraceError as error:
            _LOGGER.debug("the model cannot be traced without its inner blocks: %s", error)
            return None
        return replace(program, repeats=short.repeats)

    def plan_call(self, request: Request, meshes: Sequence[Mesh]) -> tuple[Program, Plan]:
        """Return the program of a call, and its fastest plan on any of `meshes`.

        A deep model is planned without its inner blocks if the inner blocks are like the blocks beside them. If that
        plan is slower than `before`, the model is planned with all blocks.
        """
        planner = self.begun()[0]

        def planned(program: Program) -> tuple[Program, Plan]:
            return program, planner.search_meshes(program, meshes)

        found = self._without_inner_blocks(request, planned)
        if found is not None and (self.before is None or found[1].objective <= self.before.objective):
            return found
        return planned(self.trace(request))

    def _without_inner_blocks(self, request: Request, made: Callable[[Program], _Made]) -> _Made | None:
        """Return `made(program)` for a program without inner blocks, or None if the model needs all its blocks.

        The numbers of `margins` are tried in order. A number is removed if `made` raises `NotAlikeError`.
        """
        for margin in tuple(self.margins):
            program = self.trace_with_gaps(request, margin)
            if program is None:
                return None
            try:
                return made(program)
            except NotAlikeError as error:
                _LOGGER.debug("the model is not planned without its inner blocks: %s", error)
                self.margins.remove(margin)
        return None

    def begun(self) -> tuple[Planner, Ceiling]:
        """Return a planner whose searches share one time limit, and the limit.

        The limit is `self.ceiling`. If this is None, a limit of `time_budget_s` starts now.
        """
        ceiling = self.ceiling or Ceiling.within(self.time_budget_s)
        return replace(self, ceiling=ceiling), ceiling

    def search(
        self, program: Program, mesh: Mesh, placed: Mapping[str, PartitionSpec], before: Plan | None = None
    ) -> Plan:
        """Return the plan of a program on a mesh.

        `placed` has the specs of parameters and optimizer state that are already sharded, by name. The search begins
        with the plan `before`, if there is one.
        """
        return self.search_and_lower(program, mesh, placed, before).plan

    def search_and_lower(
        self,
        program: Program,
        mesh: Mesh,
        placed: Mapping[str, PartitionSpec],
        before: Plan | None = None,
        planning: PlanningProblem | None = None,
    ) -> LoweredPlan:
        """Return the plan of `search`, and the lowered program from which its prediction was read.

        `planning` is the planning problem of the program on the mesh, if the caller has built it. The other arguments
        are those of `search`.
        """
        with self._searching() as control:
            options = replace(self._options(program, mesh, placed), before=before, control=control)
            found = plan_and_lower(program, mesh, self.cluster_for(mesh), options, planning)
        return replace(found, plan=replace(found.plan, precision=self.precision))

    def problem(self, program: Program, mesh: Mesh, placed: Mapping[str, PartitionSpec]) -> PlanningProblem:
        """Return the planning problem of a program on a mesh. `placed` is the argument of `search`."""
        return planning_problem(program, mesh, self.cluster_for(mesh), self._options(program, mesh, placed))

    @contextmanager
    def _searching(self) -> Iterator[SearchControl]:
        """Yield the control of a search, and show the search's progress.

        Ctrl-C ends the search with the best plan so far, or with KeyboardInterrupt if nothing fits yet. If the time is
        up, a `DoesNotFitError` names the time budget.
        """
        control = SearchControl(ceiling=self.begun()[1])
        with search_bar(self.time_budget_s, self.progress) as show:
            if show is not None:
                control.show = lambda found: show(found.problem, found.best, found.lower_bound)
            try:
                with interruptible(control):
                    yield control
            except DoesNotFitError as error:
                if control.is_stopped:
                    raise KeyboardInterrupt("the search was ended before anything that fits was found") from error
                if control.ceiling.has_cut:
                    raise DoesNotFitError(
                        f"time_budget_s={self.time_budget_s:g} was up before the search ended. {error} "
                        "Or give it more time.",
                        smallest_bytes=error.smallest_bytes,
                    ) from error
                raise
        if control.is_stopped:
            _LOGGER.warning("Ctrl-C ended the search for a plan: it is the best until then")

    def _options(self, program: Program, mesh: Mesh, placed: Mapping[str, PartitionSpec]) -> PlanOptions:
        constraints = constraints_on(program, self.constraints, without_state=self.has_update and not updates(program))
        whole = whole_outputs(program, self.constraints, gather=self.gather_outputs)
        constraints |= dict.fromkeys(whole, PartitionSpec())
        return PlanOptions(
            constraints={**constraints, **_within(program, placed)},
            memory_budget=self.limit_bytes(mesh),
            is_budget_given=self.memory_budget is not None,
            time_budget_s=self.time_budget_s,
            state_bytes_per_parameter_byte=0.0 if updates(program) else self.state_ratio,
            strict=self.strict,
            micro_batches=self.micro_batches,
            load=self.load,
            dispatch="graph" if self.cuda_graph else "eager",
            with_kernels=self.with_kernels,
            reduce_dtype=self.reduce_dtype,
            before=self.before,
            recipe=self.recipe if program.trains or not placed else None,  # evaluation takes parameters as they lie
            specs=self.change.specs,
            roles=self.change.roles,
            recompute=self.change.without != "recompute",
            offload=self.change.without != "offload",
        )

    def limit_bytes(self, mesh: Mesh) -> float:
        """Return the most bytes that the tensors of a rank may take."""
        room = room_bytes(self.cluster_for(mesh).device, sum(size > 1 for size in mesh.shape))
        budget = room if self.memory_budget is None else self.memory_budget
        return budget * self.change.memory

    def search_meshes(self, program: Program, meshes: Sequence[Mesh]) -> Plan:
        """Return the fastest plan on any of `meshes`. If no mesh has a plan, raise the last error.

        Meshes that differ only by names are searched once, unless an argument names axes. The meshes are searched in
        the order of their lower bounds of the step time. A mesh whose bound exceeds the best plan so far is skipped.
        """
        start = time.monotonic()
        plans, dear = list[Plan](), list[Mapping[str, float | None]]()
        names_axes = self.constraints or self.before is not None or names_axes_of(self.recipe, meshes)
        failure = None
        with self._searching() as control:
            problems: list[tuple[float, PlanningProblem, PlanOptions]] = []
            for mesh in meshes if names_axes else distinct_meshes(meshes, self.cluster_for(meshes[0])):
                options = replace(self._options(program, mesh, {}), control=control)
                try:
                    problems.append((*bounded_problem(program, mesh, self.cluster_for(mesh), options), options))
                except AutoshardError as error:
                    failure = error
                except SearchStopped:
                    if not problems:
                        raise
            for _, planning, options in sorted(problems, key=itemgetter(0)):
                if plans and control.is_over():
                    break
                try:
                    mesh, options = planning.space.mesh, replace(options, elsewhere=tuple(plans))
                    plans.append(plan_program(program, mesh, self.cluster_for(mesh), options, planning))
                except AutoshardError as error:
                    failure = error
                except DearMeshError as error:
                    dear.append(error.baselines)
            if not plans and failure is not None:
                raise failure
        best = min(plans, key=lambda plan: plan.predicted.step_time_s)
        return replace(
            best,
            precision=self.precision,
            baselines=least_baselines([*(plan.baselines for plan in plans), *dear]),
            search_time_s=time.monotonic() - start,
            was_interrupted=control.is_stopped,
            was_cut=control.ceiling.has_cut,
        )

    def cluster_for(self, mesh: Mesh) -> Cluster:
        """Return the hardware that plans for a mesh are priced for."""
        cluster = self.cluster if self.cluster is not None else local_cluster(mesh)
        return cluster if self.change.faster is None else self.change.faster(cluster) or cluster

    def prove(self, request: Request, plan: Plan) -> VerificationReport:
        """Return the proof of the program that a call runs by a plan. Raises `VerificationError` if the proof fails."""
        program = self.trace(request)
        report = replace(self, verify=True).lower(program, self._plan_for(program, request, plan.mesh))[1]
        assert report is not None, "the planner verifies"
        return report

    def _plan_for(self, program: Program, request: Request, mesh: Mesh) -> Plan:
        if self.fixed is None:
            return self._made_for(program, request, mesh) or self._search_for(program, request, mesh)
        if self.fixed.mesh != mesh:
            check_same_parameters(self.fixed, program)
            _LOGGER.info("the plan is for %s, the model runs on %s: planning again, from it", self.fixed.mesh, mesh)
            return self.search(program, mesh, request.placed, self._expanded(self.fixed, program, request))
        check_plan_fits(self.fixed, program, compare_inputs=request.grad)
        if request.grad and not request.all_tangents and self.fixed.updates == updates(program):
            return expand_for(self.fixed, program, request, self.trace)
        return self.search(program, mesh, {name: item.spec for name, item in self.fixed.parameters.items()})

    def _search_for(self, program: Program, request: Request, mesh: Mesh) -> Plan:
        """Return a new plan of a call. A deep model is planned without its inner blocks; the plan is then expanded."""

        def expanded(short: Program) -> Plan:
            return expand_plan(self.search(short, mesh, {}), prepare(short), prepare(program))

        found = None if request.placed else self._without_inner_blocks(request, expanded)
        return found or self.search(program, mesh, request.placed)

    def _made_for(self, program: Program, request: Request, mesh: Mesh) -> Plan | None:
        if self.made is None or self.made.mesh != mesh or request.placed:
            return None
        made = self._expanded(self.made, program, request)
        if made is None:
            return None
        try:
            return made if made.program_digest == prepare_for(program, made).digest() else None
        except PlanMismatchError as error:
            _LOGGER.debug("the plan is not of this call: %s", error)
            return None

    def _free(self) -> Planner:
        """Return the planner without plans, constraints, recipe and `reduce_dtype`, which are for training steps."""
        return replace(self, fixed=None, made=None, before=None, constraints={}, recipe=None, reduce_dtype=None)

    def _expanded(self, plan: Plan, program: Program, request: Request) -> Plan | None:
        """Return a plan expanded to all blocks of the program, or None if the plan is not for this call."""
        try:
            return expand_for(plan, program, request, self.trace)
        except PlanMismatchError as error:
            _LOGGER.debug("the plan is not of this call: %s", error)
            return None

    def lower(
        self, program: Program, chosen: Plan, predicted: PhasedProgram | None = None
    ) -> tuple[PhasedProgram, VerificationReport | None]:
        """Return the program of one rank, and its proof if the user wants a proof.

        `predicted` is the lowered program from which the prediction was read. It is returned if the ranks run it
        unchanged, for example without kernels.
        """
        on_pass = verify_pass if verifies_each_pass() else None
        is_plain = self.with_native and not (self.with_kernels or self.for_compiler or on_pass)
        phased = predicted
        if phased is None or not is_plain:
            phased = lower_program(
                program,
                chosen,
                self.cluster_for(chosen.mesh),
                LoweringOptions(
                    with_kernels=self.with_kernels and not self.for_compiler,
                    saves_least=self.for_compiler,
                    with_native=self.with_native,
                    reduce_dtype=self.reduce_dtype,
                    micro_batches=self.micro_batches,
                    load=self.load,
                    on_pass=on_pass,
                ),
            )
        if not self.verify:
            return phased, None
        verify_preparation(program, phased.lowered.traced)
        report = verify_program(phased.lowered.traced, phased.lowered, phased.carried if self.micro_batches > 1 else ())
        verify_phases(phased)
        _LOGGER.debug("%s", report)
        return phased, report


def updates(program: Program) -> bool:
    """Whether a program is a whole training step, with the update of parameters."""
    return bool(program.outputs_of(OutputKind.PARAMETER_UPDATE))


def _within(program: Program, placed: Mapping[str, PartitionSpec]) -> dict[str, PartitionSpec]:
    """Return the entries of `placed` for parameters and state that a program has."""
    names = {slot.name for slot in program.inputs}
    return {name: spec for name, spec in placed.items() if name in names}
