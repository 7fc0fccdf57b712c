"""The order of the passes, as data, and the two things that are made with them: plans and lowered programs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from autoshard.ir.kernels import NO_KERNELS, Kernels
from autoshard.ir.lowered import LoweredProgram, PhasedProgram
from autoshard.ir.mesh import Mesh
from autoshard.ir.offload import Offload
from autoshard.ir.plan import Plan
from autoshard.ir.plan_parts import NodePlan, Prediction
from autoshard.ir.program import OWNERS, InputKind, OutputSlot, Program, describe
from autoshard.ir.recompute import Recompute
from autoshard.ir.repeat import names_alike
from autoshard.ir.reshard import StepCost
from autoshard.ir.spec import PartitionSpec
from autoshard.rules.enumeration import Strategy
from cost_models.hardware import Cluster
from cost_models.streams import overlap_of
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
from passes.overlap import overlapped, room_of
from passes.phases import OnPass, phases_of, run_passes
from passes.planning.baselines import solve_baselines
from passes.planning.bucket_prices import solve_in_buckets
from passes.planning.build_assignment import PlanningProblem, build_problem
from passes.planning.constraints import allowed_options
from passes.planning.cover import cover
from passes.planning.kernel_prices import NOTHING_FUSED, Fusion, find_fusion
from passes.planning.rewrite_prices import Within
from passes.planning.search import Search
from passes.prediction.name_layouts import plan_of_parameter
from passes.prediction.predict import TODAY, Runtime, predict
from passes.prediction.segment_step import repeated_step
from passes.prediction.walk_program import WalkedStep, walk_program
from passes.preparation.canonicalize import Canonicalize
from passes.preparation.insert_hubs import InsertHubs
from passes.recomputation.plan_before import solution_of
from passes.recomputation.recompute import InsertRecompute
from passes.recomputation.recompute_search import solve_jointly
from passes.recomputation.savings import savings_of
from passes.solver.assignment import Solution
from passes.solver.one_thread import one_blas_thread
from passes.solver.search_control import ALL_PLANS, SearchControl
from passes.strategies.elided import find_elided
from passes.strategies.enumerate_strategies import EnumerateStrategies, SearchSpace, Site
from passes.strategies.fold_blocks import fold_blocks
from passes.strategies.price import Prices, StepPrice
from passes.strategies.price_nodes import NodePrices
from passes.strategies.scratch import emitted_call

if TYPE_CHECKING:
    from autoshard.kernels.kernel import FusedKernel

logger = logging.getLogger(__name__)

PREPARATION: Sequence[Callable[[Program], Program]] = (Canonicalize(), InsertHubs())
"""What brings a traced program into the form that is planned and lowered, in order."""

_NEAR = 0.1
"""A known recipe that costs so much more than what the search found is not faster where communication is hidden."""

_SURE = 0.01
"""Part of a step by which a choice at the prices of buckets must be faster than the search's, and known recipes."""

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
    """

    planning: PlanningProblem
    solution: Solution
    recompute: Recompute
    offload: Offload
    baselines: Mapping[str, Solution | None]
    bucketed: Solution | None = None


UNKNOWN = Prediction(0.0, 0, {}, {})
"""Of a plan that is made to be lowered."""

_PREPARED = "autoshard: as traced, and prepared"
_KERNELS = "autoshard: its kernels on one device"


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
    start = time.monotonic()
    with options.control.building():
        planning = planning_problem(program, mesh, cluster, options)
    built = time.monotonic()
    logger.debug("enumeration took %.3f s", built - start)
    found = solve(planning, options, allowed_options(planning, options.constraints))
    logger.debug("search took %.3f s", time.monotonic() - built)
    plan = fastest(planning, found, cluster, options)
    costs = {name: None if priced is None else priced.cost for name, priced in found.baselines.items()}
    return replace(
        plan,
        baselines=costs,
        search_time_s=time.monotonic() - start,
        was_interrupted=options.control.is_stopped,
    )


def fastest(planning: PlanningProblem, found: Decision, cluster: Cluster, options: PlanOptions) -> Plan:
    """The plan of the search, of a known recipe that is nearly as cheap, or of the search with prices of buckets.

    Their lowered programs say which is fastest. The search adds up what a step does; what runs puts collectives into
    buckets and hides them, in some plans more than in others. The bound is the search's.
    """
    solution, limit = found.solution, (1 + _NEAR) * found.solution.cost
    plan = plan_of_choice(found.planning, solution.choice, solution.cost, solution.lower_bound, cluster, options)
    best = replace(plan, recompute=found.recompute, offload=found.offload)
    if options.runtime.overlap is not None or options.with_kernels:
        return best
    seen = {solution.choice} if found.planning is planning else set()
    for each in (*found.baselines.values(), found.bucketed):
        if each is None or each.cost > limit or each.choice in seen:
            continue
        seen.add(each.choice)
        other = plan_of_choice(planning, each.choice, each.cost, solution.lower_bound, cluster, options)
        fits = options.memory_budget is None or other.predicted.peak_memory_bytes <= options.memory_budget
        gain = _SURE if each is found.bucketed else 0.0
        if fits and _is_faster(other.predicted, best.predicted, gain, cluster):
            best = other
    return best


def _is_faster(plan: Prediction, other: Prediction, gain: float, cluster: Cluster) -> bool:
    """Whether a step is faster by a part of it; on CPUs of one machine, of two as fast, the one that launches less."""
    if overlap_of(cluster) is None and abs(plan.step_time_s / other.step_time_s - 1) < _SURE:
        return plan.launches < other.launches
    return plan.step_time_s < (1 - gain) * other.step_time_s


@one_blas_thread()
def solve(planning: PlanningProblem, options: PlanOptions, allowed: Mapping[int, np.ndarray]) -> Decision:
    """The cheapest choice within the options that are `allowed`; nothing is recomputed where blocks are left out.

    Raises:
        DoesNotFitError: no choice fits in the memory limit.
    """
    end = time.monotonic() + options.time_budget_s
    search = Search(options.memory_budget, options.time_budget_s, control=options.control)
    quick = replace(
        search, time_budget_s=_BASELINE_SHARE * options.time_budget_s, tolerance=1e-2, max_rounds=_BASELINE_ROUNDS,
        most_parts=0, most_targets=0, says_smallest=False, is_exact=False,
    )  # fmt: skip
    baselines = solve_baselines(planning, quick, allowed, options.before, end) if options.with_baselines else {}
    start = [found for found in baselines.values() if found is not None]
    bucketed = None
    if options.with_baselines and not planning.elided.sites:
        bucketed = solve_in_buckets(planning, BucketCollectives().least_bytes, quick, allowed)
    search = replace(search, time_budget_s=max(0.0, end - time.monotonic()))
    options.control.problem = ALL_PLANS
    recompute = options.recompute and not planning.elided.sites
    before = None if options.before is None else solution_of(options.before, planning, allowed)
    found = solve_jointly(
        planning, search, allowed, start, recompute=recompute, offload=options.offload, before=before
    )  # fmt: skip
    return Decision(found.planning, found.solution, *savings_of(planning, found), baselines, bucketed)


def planning_problem(program: Program, mesh: Mesh, cluster: Cluster, options: PlanOptions) -> PlanningProblem:
    """The assignment problem whose solutions are the plans of a program.

    Raises:
        NotAlikeError: the program leaves out blocks, and those beside them are not alike.
    """
    space = EnumerateStrategies(mesh, options.strict, prune=True, wide_gradients=True)(prepare(program))
    elided, prices = find_elided(space), Prices(cluster, mesh)
    ratio = options.state_bytes_per_parameter_byte
    liveness = with_elided(find_lifetimes(space, ratio, options.micro_batches), elided, space)
    fusion = _fusion(space, prices) if options.with_kernels else NOTHING_FUSED
    return build_problem(space, prices, liveness, fold_blocks(space), elided, fusion)


def _fusion(space: SearchSpace, prices: Prices) -> Fusion:
    """What kernels do to prices."""
    from passes.lowering.price_kernels import price_within

    kernels, takers = _kernels_known(space, prices.cluster)
    alone = takers.difference(*(use.stands_for for use in kernels.uses))

    def within(site: Site, strategy: Strategy) -> Within:
        assert site.node is not None, "calls have nodes"
        call = emitted_call(site, strategy, prices.mesh)
        return Within(*price_within(call, site.node, prices.cluster.device, cheap_kernels(), alone))

    return find_fusion(space, prices, kernels, takers, within)


def _kernels_known(space: SearchSpace, cluster: Cluster) -> tuple[Kernels, frozenset[str]]:
    """`kernels_on_one_device`, found once for all meshes, and kept with the prepared graph."""
    program, device = space.program, cluster.device
    of_program, of_device, kernels = program.graph_module.meta.get(_KERNELS, (None, None, (NO_KERNELS, frozenset())))
    if of_program is not program or of_device != device:
        kernels = kernels_on_one_device(space, cluster)
        program.graph_module.meta[_KERNELS] = (program, device, kernels)
    return kernels


def kernels_on_one_device(space: SearchSpace, cluster: Cluster) -> tuple[Kernels, frozenset[str]]:
    """The Triton kernels with which a program would run where every value is whole, for its search.

    And the pointwise calls that are, or may be, in generated ones.
    """
    from passes.lowering.price_kernels import fused_phases, pointwise_calls, price_phases

    lowered = on_one_device(space)
    phased = fused_phases(lowered, cheap_kernels())
    return price_phases(lowered, phased, cluster.device), pointwise_calls(phased)


def cheap_kernels() -> tuple[FusedKernel, ...]:
    """The hand-written kernels that searches know: not those that compute anew, which save memory, by the specs."""
    from autoshard.kernels.registry import FUSED

    return tuple(kernel for kernel in FUSED if not kernel.readers_of_anew)


def on_one_device(space: SearchSpace) -> LoweredProgram:
    """A program lowered with every value whole; the first strategies of its sites are that."""
    first = {name: site.strategies[0] for name, site in space.sites.items() if site.node is not None}
    whole = Plan(
        mesh=space.mesh,
        program_digest=space.program.digest(),
        inputs={},
        nodes={name: NodePlan(strategy.inputs, strategy.outputs) for name, strategy in first.items()},
        outputs={result_key(slot): PartitionSpec() for slot in space.program.outputs},
        parameters={},
        predicted=UNKNOWN,
        objective=0.0,
        lower_bound=None,
        search_time_s=0.0,
        hardware="",
    )
    return Lower(whole)(space.program)


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
        with_overlap: let collectives run beside computation, gradients' in buckets, rather than each where it stands.
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
    return overlapped(phased, on_pass, micro_batches, room, cluster) if with_overlap else phased


def plan_of_choice(
    planning: PlanningProblem,
    choice: Sequence[int],
    objective: float,
    lower_bound: float | None,
    cluster: Cluster,
    options: PlanOptions,
) -> Plan:
    """The plan that a choice of one option per variable of `planning` stands for; `objective` in seconds."""
    plan = _plan_of_operators(planning, choice, objective, lower_bound, cluster, options)
    plan = replace(plan, predicted=predict(planning, choice, options.runtime, record=options.with_kernels))
    if not options.with_kernels:
        walked = _walked(planning, plan, choice, cluster, options) if options.runtime.overlap is None else None
        return replace(plan, predicted=predict(planning, choice, options.runtime, walked=walked, record=True))
    kernels = kernels_of(plan, planning.space.program, cluster, planning.elided.site_counts())
    predicted = predict(planning, choice, options.runtime, kernels, record=True)
    kernels = replace(kernels, breakdown_without=plan.predicted.breakdown)
    return replace(plan, predicted=replace(predicted, kernels=kernels))


def _walked(
    planning: PlanningProblem, plan: Plan, choice: Sequence[int], cluster: Cluster, options: PlanOptions
) -> WalkedStep:
    """The step of a plan as its lowered program says, and what passes behind `SplitPhases` add to its peak.

    A program without its inner blocks is lowered without overlap, and nothing hoisted: what fits is not that of the
    whole. Where communication overlaps, its step is that of the planning problem, as `segment_step` writes it down.
    """
    micro_batches, is_whole = planning.liveness.micro_batches, not planning.elided.sites
    phased = lower_prepared(
        planning.space.program, plan, cluster, with_overlap=is_whole, reduce_dtype=options.reduce_dtype,
        micro_batches=micro_batches if is_whole else 1,
    )  # fmt: skip
    walked = walk_program(phased, NodePrices(cluster, plan.mesh), planning.elided, micro_batches)
    if not is_whole and overlap_of(cluster) is not None:
        walked = replace(walked, segments=repeated_step(planning, choice, micro_batches))
    plain, made = (peak_bytes(item, micro_batches=micro_batches) for item in (SplitPhases()(phased.lowered), phased))
    return replace(walked, passes_bytes=made - plain)


def kernels_of(plan: Plan, prepared: Program, cluster: Cluster, counts: Mapping[str, int]) -> Kernels:
    """The Triton kernels that a plan runs with; nothing is written for them.

    Args:
        plan: the plan.
        prepared: its program, as `prepare_for` gives it.
        cluster: what it is priced for.
        counts: node to how often it runs, where that is not once (`Elided.site_counts`).
    """
    from passes.lowering.price_kernels import price_kernels

    return price_kernels(Lower(plan, StepPrice(cluster, plan.mesh))(prepared), cluster.device, counts)


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
        memory_budget=None if options.memory_budget is None else int(options.memory_budget),
        replicated_operators=planning.space.replicated_operators,
        operators=cover(planning, choice),
        repeats=program.repeats,
    )


def _result_spec(planning: PlanningProblem, choice: Sequence[int], slot: OutputSlot) -> PartitionSpec:
    if slot.kind not in OWNERS:
        return planning.strategy(slot.name, choice).inputs[0]
    return planning.strategy(planning.space.owner(slot), choice).outputs[0]
