"""The order of the passes, as data, and the two things that are made with them: plans and lowered programs."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import numpy as np
import torch

from autoshard.errors import RecipeError
from autoshard.ir.lowered import PhasedProgram
from autoshard.ir.mesh import Mesh
from autoshard.ir.offload import Offload
from autoshard.ir.plan import Plan
from autoshard.ir.plan_parts import UNKNOWN, NodePlan, Prediction
from autoshard.ir.program import OWNERS, InputKind, OutputSlot, Program, describe
from autoshard.ir.recipe import Recipe
from autoshard.ir.recompute import Recompute
from autoshard.ir.repeat import names_alike
from autoshard.ir.reshard import StepCost
from autoshard.ir.spec import PartitionSpec
from cost_models.hardware import Cluster
from passes.kernels_on_one_device import fusion_of, kernels_of
from passes.lowering.bucket_collectives import BucketCollectives
from passes.lowering.hoist import Hoist
from passes.lowering.join_biases import JoinBiases
from passes.lowering.lower import Lower, result_key
from passes.lowering.name_communicators import NameCommunicators
from passes.lowering.narrow_reductions import NarrowReductions
from passes.lowering.node_time import NodeTime
from passes.lowering.select_kernels import SelectKernels
from passes.lowering.split_phases import SplitPhases
from passes.memory.elided_lifetimes import with_elided
from passes.memory.liveness import find_lifetimes
from passes.memory.lowered_memory import peak_bytes
from passes.overlap import buckets_of, overlapped, room_of
from passes.phases import OnPass, phases_of, run_passes
from passes.planning.baselines import solve_baselines
from passes.planning.bucket_prices import in_buckets, solve_in_buckets
from passes.planning.build_assignment import PlanningProblem, build_problem
from passes.planning.constraints import allowed_options
from passes.planning.cover import cover
from passes.planning.kernel_prices import NOTHING_FUSED
from passes.planning.restrictions import restricted
from passes.planning.search import Search
from passes.prediction.name_layouts import plan_of_parameter
from passes.prediction.predict import TODAY, Runtime, predict
from passes.prediction.segment_step import folded_step
from passes.prediction.walk_program import WalkedStep, walk_program
from passes.preparation.canonicalize import Canonicalize
from passes.preparation.insert_hubs import InsertHubs
from passes.preparation.join_gelu import JoinGelu
from passes.recomputation.fitting import JointSolution
from passes.recomputation.plan_before import solution_of
from passes.recomputation.recompute import InsertRecompute
from passes.recomputation.recompute_search import solve_jointly
from passes.recomputation.savings import savings_of
from passes.recomputation.whole_blocks import joint_with_blocks, with_whole_blocks
from passes.solver.assignment import Assignment, Solution
from passes.solver.one_thread import one_blas_thread
from passes.solver.search_control import ALL_PLANS, SearchControl
from passes.strategies.elided import find_elided
from passes.strategies.enumerate_strategies import EnumerateStrategies
from passes.strategies.fold_blocks import fold_blocks
from passes.strategies.price import Prices, StepPrice
from passes.strategies.price_nodes import NodePrices

logger = logging.getLogger(__name__)

PREPARATION: Sequence[Callable[[Program], Program]] = (Canonicalize(), JoinGelu(), InsertHubs())
"""What brings a traced program into the form that is planned and lowered, in order."""

_NEAR = 0.1
"""A choice that costs this part more than the search's own is not faster by hiding its communication."""

_SURE = 0.01
"""Part of a step by which a choice at the prices of buckets must be faster than the search's, and known recipes."""

_ALIKE = 0.02
"""Part of a step within which plans on CPUs are as fast: prices are off by more (`tests.benchmarks.local_plans`)."""

_BASELINE_ROUNDS, _BASELINE_SHARE = 6, 0.1
"""Rounds of the search for the best plan within a known recipe, and the part of the time that it may take."""


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What a user may ask of a plan.

    Args:
        constraints: glob of qualified names to the spec they must have.
        memory_budget: bytes per device, None for no limit.
        time_budget_s: seconds for the search.
        state_bytes_per_parameter_byte: optimizer state as a multiple of the parameters' bytes (2 for Adam in float32).
        strict: refuse operators without a sharding rule.
        with_baselines: price the known recipes too.
        before: a plan of the program, on this mesh or another, to start from; the result is not worse than it is here,
            if it fits (on another mesh: without what it recomputes and offloads).
        micro_batches: how many of them a training step has; the program is that of one.
        runtime: what the prediction is of: what runs today, or a runtime that overlaps (`passes.prediction.predict`).
        recompute: whether values of the forward may be computed again in the backward where memory is short.
        offload: whether, then, they may also lie in the host's memory until the backward.
        reduce_dtype: in which gradients of float32 travel between ranks; predicted, while the search prices their own.
        with_kernels: whether calls are priced within the Triton kernels that run in place of them.
        recipe: within which the plan is searched; None: everywhere.
        elsewhere: seconds that a plan on another mesh costs, as its search counts; far dearer choices are not lowered.
        control: told how the search goes, and may stop it: the plan is then the best until then.
    """

    constraints: Mapping[str, PartitionSpec] = field(default_factory=dict)
    memory_budget: float | None = None
    time_budget_s: float = 60.0
    state_bytes_per_parameter_byte: float = 0.0
    strict: bool = False
    with_baselines: bool = True
    before: Plan | None = None
    micro_batches: int = 1
    runtime: Runtime = TODAY
    recompute: bool = True
    offload: bool = True
    reduce_dtype: torch.dtype | None = None
    with_kernels: bool = False
    recipe: Recipe | None = None
    elsewhere: float = math.inf
    control: SearchControl = field(default_factory=SearchControl)


@dataclass(frozen=True, slots=True)
class Decision:
    """What a search decided.

    Args:
        planning: the planning problem of the program as it will run, with what is recomputed.
        solution: one option per variable of `planning`.
        recompute: what is recomputed.
        offload: what is offloaded.
        baselines: the best solutions of the known recipes, without recomputation; None where none fits.
        bucketed: the best solution with what is sent of parameters and gradients priced in buckets, likewise.
        in_buckets: those prices.
        kept: a good solution that keeps everything, where the best recomputes or offloads; likewise.
    """

    planning: PlanningProblem
    solution: Solution
    recompute: Recompute
    offload: Offload
    baselines: Mapping[str, Solution | None]
    bucketed: Solution | None = None
    in_buckets: Assignment | None = None
    kept: Solution | None = None

    def may_be_faster(self, other: Solution, elsewhere: float) -> bool:
        """Whether a choice is nearly as cheap as this and as that `elsewhere`, or cheaper at the prices of buckets."""
        priced, nearest = self.in_buckets, min(elsewhere, (self.kept or self.solution).cost)
        is_cheaper = priced is not None and priced.cost_of(other.choice) < priced.cost_of(self.solution.choice)
        return is_cheaper or other.cost <= (1 + _NEAR) * nearest


@dataclass(frozen=True, slots=True)
class LoweredPlan:
    """A plan, and the program that it was predicted from.

    Args:
        plan: the plan.
        phased: what `lower_program` makes of it, without kernels; None: it was predicted with them, or without blocks.
    """

    plan: Plan
    phased: PhasedProgram | None = None


_PREPARED = "autoshard: as traced, and prepared"


def prepare(program: Program) -> Program:
    """The program in the form that is planned and lowered; made once, and kept with the traced graph."""
    traced, prepared = program.graph_module.meta.get(_PREPARED, (None, None))
    if traced is not program:
        prepared = run_passes(PREPARATION, program)
        program.graph_module.meta[_PREPARED] = (program, prepared)
    return prepared


def plan_program(program: Program, mesh: Mesh, cluster: Cluster, options: PlanOptions) -> Plan:
    """The plan of least predicted step time that fits.

    Raises:
        DoesNotFitError, NoShardingRuleError, InvalidSpecError: see `PlanOptions`.
        SearchStopped: `options.control` was stopped before the search began.
    """
    return plan_and_lower(program, mesh, cluster, options).plan


def plan_and_lower(program: Program, mesh: Mesh, cluster: Cluster, options: PlanOptions) -> LoweredPlan:
    """`plan_program`, with the lowered program that the plan was predicted from."""
    start = time.monotonic()
    with options.control.building():
        planning = planning_problem(program, mesh, cluster, options)
    built = time.monotonic()
    logger.debug("enumeration took %.3f s", built - start)
    found = solve(planning, options, allowed_by(planning, options))
    logger.debug("search took %.3f s", time.monotonic() - built)
    best = fastest(planning, found, cluster, options, start + options.time_budget_s)
    costs = {name: None if priced is None else priced.cost for name, priced in found.baselines.items()}
    took_s, is_stopped = time.monotonic() - start, options.control.is_stopped
    return replace(best, plan=replace(best.plan, baselines=costs, search_time_s=took_s, was_interrupted=is_stopped))


def fastest(
    planning: PlanningProblem, found: Decision, cluster: Cluster, options: PlanOptions, until: float = math.inf
) -> LoweredPlan:
    """The plan of the search, of a known recipe, with prices of buckets, or that keeps all, where it may be faster.

    Their lowered programs say which is fastest. The search adds up what a step does; what runs puts collectives into
    buckets and hides them, in some plans more than in others, and never what is recomputed. The bound is the search's.
    From `until` on, a time of `time.monotonic`, no others are lowered.
    """
    solution = found.solution
    best = _lowered_of(found.planning, solution.choice, solution.cost, solution.lower_bound, cluster, options)
    best = replace(best, plan=replace(best.plan, recompute=found.recompute, offload=found.offload))
    if options.runtime.overlap is not None or options.with_kernels:
        return best
    seen = {solution.choice} if found.planning is planning else set()
    for each in takewhile(lambda _: time.monotonic() < until, (*found.baselines.values(), found.kept, found.bucketed)):
        if each is None or each.choice in seen or not found.may_be_faster(each, options.elsewhere):
            continue
        seen.add(each.choice)
        other = _lowered_of(planning, each.choice, each.cost, solution.lower_bound, cluster, options)
        predicted = other.plan.predicted
        fits = options.memory_budget is None or predicted.peak_memory_bytes <= options.memory_budget
        gain = _SURE if each is found.bucketed else 0.0
        if fits and _is_faster(predicted, best.plan.predicted, gain, cluster):
            recompute, offload = savings_of(*joint_with_blocks(JointSolution(planning, each)))
            best = replace(other, plan=replace(other.plan, recompute=recompute, offload=offload))
    return best


def _is_faster(plan: Prediction, other: Prediction, gain: float, cluster: Cluster) -> bool:
    """Whether a step is faster by a part of it; on CPUs, of two as fast, whether it launches less."""
    if not cluster.device.dispatch_s and abs(plan.step_time_s - other.step_time_s) <= _ALIKE * other.step_time_s:
        return plan.launches < other.launches
    return plan.step_time_s < (1 - gain) * other.step_time_s


@one_blas_thread()
def solve(planning: PlanningProblem, options: PlanOptions, allowed: Mapping[int, np.ndarray]) -> Decision:
    """The cheapest choice within the options that are `allowed`, and others that are nearly as cheap.

    Raises:
        DoesNotFitError, NotAlikeError: no choice fits; blocks left out and those beside them do not recompute alike.
    """
    end = time.monotonic() + options.time_budget_s
    search = Search(options.memory_budget, options.time_budget_s, control=options.control)
    quick = replace(
        search, time_budget_s=_BASELINE_SHARE * options.time_budget_s, tolerance=1e-2, max_rounds=_BASELINE_ROUNDS,
        is_thorough=False, says_smallest=False, is_exact=False,
    )  # fmt: skip
    baselines = solve_baselines(planning, quick, allowed, options.before, end) if options.with_baselines else {}
    start, bucketed, priced = [found for found in baselines.values() if found is not None], None, None
    if options.with_baselines:
        priced = in_buckets(planning, BucketCollectives().least_bytes)
        bucketed = solve_in_buckets(planning, priced, quick, allowed)
    search = replace(search, time_budget_s=max(0.0, end - time.monotonic()))
    options.control.problem = ALL_PLANS
    recompute = options.recompute and (options.recipe is None or options.recipe.recompute is None)
    offload = options.offload and (options.recipe is None or options.recipe.offload is None)
    before = None if options.before is None else solution_of(options.before, planning, allowed)
    found = solve_jointly(planning, search, allowed, start, recompute=recompute, offload=offload, before=before)
    without, found = joint_with_blocks(found) if found.planning is planning else (planning, found)
    priced = priced if found.planning is planning else None  # of another problem the choice has no such price
    return Decision(
        found.planning, found.solution, *savings_of(without, found), baselines, bucketed, priced, found.kept
    )


def allowed_by(planning: PlanningProblem, options: PlanOptions) -> dict[int, np.ndarray]:
    """The options that a user's constraints and recipe leave.

    Raises:
        InvalidSpecError: see `allowed_options`.
        RecipeError: see `restricted`; or the two leave nothing together.
    """
    allowed = allowed_options(planning, options.constraints)
    if options.recipe is None:
        return allowed
    masks = restricted(planning, options.recipe)
    both = {**masks, **{variable: mask & masks.get(variable, mask) for variable, mask in allowed.items()}}
    for variable, mask in both.items():
        if not mask.any():
            raise RecipeError(
                f"constraints= and recipe= ({options.recipe.words}) leave no spec for "
                f"{planning.members[variable][0]!r} together. Leave one of the two out."
            )
    return both


def planning_problem(program: Program, mesh: Mesh, cluster: Cluster, options: PlanOptions) -> PlanningProblem:
    """The assignment problem whose solutions are the plans of a program.

    Raises:
        NotAlikeError: the program leaves out blocks, and those beside them are not alike, or do not recompute alike.
    """
    space = EnumerateStrategies(mesh, options.strict, prune=True, wide_gradients=True)(prepare(program))
    elided, prices = find_elided(space), Prices(cluster, mesh)
    ratio = options.state_bytes_per_parameter_byte
    liveness = with_elided(find_lifetimes(space, ratio, options.micro_batches), elided, space)
    fusion = fusion_of(space, prices) if options.with_kernels else NOTHING_FUSED
    planning = build_problem(space, prices, liveness, fold_blocks(space), elided, fusion)
    return planning if options.recipe is None else with_whole_blocks(planning, options.recipe)


def prepare_for(program: Program, plan: Plan) -> Program:
    """The program in the form that a plan is for, with what it recomputes; `PlanMismatchError` if it is of another."""
    return InsertRecompute(plan.recompute.nodes, plan.offload.nodes)(prepare(program))


def lower_program(
    program: Program,
    plan: Plan,
    cluster: Cluster | None = None,
    *,
    with_kernels: bool = False,
    with_generated: bool = True,
    with_native: bool = True,
    with_overlap: bool = True,
    reduce_dtype: torch.dtype | None = None,
    saves_least: bool = False,
    micro_batches: int = 1,
    on_pass: OnPass | None = None,
) -> PhasedProgram:
    """The per-rank program of a plan, cut into forward and backward.

    Args:
        program: as traced.
        plan: made for this program.
        cluster: where it runs; decides between reshards of equal effect. None goes by bytes sent.
        with_kernels: let Triton kernels stand in for operators of the phases; the lowered program as a whole stays
            without, for verification.
        with_generated: generated ones too, for the groups that hand-written ones leave.
        with_native: let torch's fused kernels run semantic operators, rather than their definitions.
        with_overlap: let collectives run beside computation, gradients' in buckets, and experts keep what was sent.
        reduce_dtype: in which gradients of float32 travel between ranks; None: in their own.
        saves_least: let the backward compute again what a compiler fuses; for programs without kernels.
        micro_batches: how many a training step has: what depends on parameters alone is computed once for all of them.
        on_pass: sees every pass, those that prepare the program too; it is then prepared anew.

    Raises:
        PlanMismatchError: the plan is of another program.
    """
    passes = (*PREPARATION, InsertRecompute(plan.recompute.nodes, plan.offload.nodes))
    prepared = prepare_for(program, plan) if on_pass is None else run_passes(passes, program, on_pass)
    return lower_prepared(
        prepared, plan, cluster, with_kernels=with_kernels, with_generated=with_generated, with_native=with_native,
        with_overlap=with_overlap, reduce_dtype=reduce_dtype, saves_least=saves_least, micro_batches=micro_batches,
        on_pass=on_pass,
    )  # fmt: skip


def lower_prepared(
    prepared: Program,
    plan: Plan,
    cluster: Cluster | None = None,
    *,
    with_kernels: bool = False,
    with_generated: bool = True,
    with_native: bool = True,
    with_overlap: bool = True,
    reduce_dtype: torch.dtype | None = None,
    saves_least: bool = False,
    micro_batches: int = 1,
    on_pass: OnPass | None = None,
) -> PhasedProgram:
    """`lower_program` of a program as `prepare_for` gives it: what runs, and what a decided plan is predicted from."""
    step_cost: StepCost | None = StepPrice(cluster, plan.mesh) if cluster is not None else None
    lowered = run_passes((Lower(plan, step_cost),), prepared, on_pass)
    narrow = () if reduce_dtype is None else (NarrowReductions(reduce_dtype),)
    last = (*((SelectKernels(), JoinBiases()) if with_native else ()), NameCommunicators(), *narrow)
    room = room_of(prepared, plan)
    first = (SplitPhases(saves_least), Hoist(micro_batches, NodeTime(plan.mesh, cluster), room))
    phased = phases_of(lowered, cluster, first, last, with_kernels, with_generated, on_pass)
    return overlapped(phased, on_pass, micro_batches, room, cluster, not saves_least) if with_overlap else phased


def plan_of_choice(
    planning: PlanningProblem,
    choice: Sequence[int],
    objective: float,
    lower_bound: float | None,
    cluster: Cluster,
    options: PlanOptions,
) -> Plan:
    """The plan that a choice of one option per variable of `planning` stands for; `objective` in seconds."""
    return _lowered_of(planning, choice, objective, lower_bound, cluster, options).plan


def _lowered_of(
    planning: PlanningProblem,
    choice: Sequence[int],
    objective: float,
    lower_bound: float | None,
    cluster: Cluster,
    options: PlanOptions,
) -> LoweredPlan:
    """`plan_of_choice`, with the program that it was predicted from."""
    plan = _plan_of_operators(planning, choice, objective, lower_bound, cluster, options)
    plan = replace(plan, predicted=predict(planning, choice, options.runtime, record=options.with_kernels))
    if not options.with_kernels:
        walked, phased = None, None
        if options.runtime.overlap is None:
            walked, phased = _walked(planning, plan, choice, cluster, options)
        plan = replace(plan, predicted=predict(planning, choice, options.runtime, walked=walked, record=True))
        return LoweredPlan(plan, None if planning.elided.sites else phased)
    kernels = kernels_of(plan, planning.space.program, cluster, planning.elided.site_counts())
    predicted = predict(planning, choice, options.runtime, kernels, record=True)
    kernels = replace(kernels, breakdown_without=plan.predicted.breakdown)
    return LoweredPlan(replace(plan, predicted=replace(predicted, kernels=kernels)))


def _walked(
    planning: PlanningProblem, plan: Plan, choice: Sequence[int], cluster: Cluster, options: PlanOptions
) -> tuple[WalkedStep, PhasedProgram]:
    """The step of a plan as its lowered program says, with what passes behind `SplitPhases` add to its peak; and that.

    A program without its inner blocks is lowered without overlap, and nothing hoisted: what fits is not that of the
    whole. Its step is that of the planning problem, as `folded_step` writes it down, with what travels in buckets.
    """
    micro_batches, is_whole = planning.liveness.micro_batches, not planning.elided.sites
    made: dict[type, Any] = {}
    phased = lower_prepared(
        planning.space.program, plan, cluster, with_overlap=is_whole, reduce_dtype=options.reduce_dtype,
        micro_batches=micro_batches if is_whole else 1, on_pass=lambda one, _, result: made.update({type(one): result}),
    )  # fmt: skip
    prices = NodePrices(cluster, plan.mesh)
    if is_whole:
        walked = walk_program(phased, prices, micro_batches)
    else:
        walked = folded_step(planning, choice, phased, prices, micro_batches, buckets_of(cluster).largest_bytes)
    plain, peak = (peak_bytes(item, micro_batches=micro_batches) for item in (made[SplitPhases], phased))
    return replace(walked, passes_bytes=peak - plain), phased


def _plan_of_operators(
    planning: PlanningProblem,
    choice: Sequence[int],
    objective: float,
    lower_bound: float | None,
    cluster: Cluster,
    options: PlanOptions,
) -> Plan:
    """The plan without kernels, and without a prediction."""
    program = planning.space.program
    traced = program.nodes_by_name()
    strategies = {name: planning.strategy(name, choice) for name in planning.space.sites}
    nodes = {
        name: NodePlan(strategies[name].inputs, strategies[name].outputs)
        for name, site in planning.space.sites.items()
        if site.node is not None
    }
    return Plan(
        mesh=planning.space.mesh,
        program_digest=program.digest(),
        inputs={slot.name: describe(traced[slot.node].meta["val"]) for slot in program.inputs_of(InputKind.INPUT)},
        nodes=nodes,
        outputs={
            result_key(whole): spec
            for slot in program.outputs
            for spec in (_result_spec(planning, choice, slot),)
            for whole in (replace(slot, name=name) for name in names_alike(program.repeats, slot.name))
        },
        parameters={
            name: place
            for slot in program.inputs_of(InputKind.PARAMETER)
            for place in (plan_of_parameter(planning, choice, slot),)
            for name in names_alike(program.repeats, slot.name)
        },
        predicted=UNKNOWN,
        objective=objective,
        lower_bound=lower_bound,
        search_time_s=0.0,
        hardware=cluster.name,
        micro_batches=planning.liveness.micro_batches,
        recipe=options.recipe,
        memory_budget=None if options.memory_budget is None else int(options.memory_budget),
        replicated_operators=planning.space.replicated_operators,
        operators=cover(planning, choice),
        repeats=program.repeats,
    )


def _result_spec(planning: PlanningProblem, choice: Sequence[int], slot: OutputSlot) -> PartitionSpec:
    if slot.kind not in OWNERS:
        return planning.strategy(slot.name, choice).inputs[0]
    return planning.strategy(planning.space.owner(slot), choice).outputs[0]
