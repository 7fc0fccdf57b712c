"""The plan that a choice of the planning problem stands for, predicted from its lowered program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from autoshard.ir.kernels import Kernels
from autoshard.ir.lowered import PhasedProgram
from autoshard.ir.plan import Plan
from autoshard.ir.plan_parts import UNKNOWN, NodePlan
from autoshard.ir.program import OWNERS, InputKind, OutputSlot, Program, describe
from autoshard.ir.repeat import names_alike
from autoshard.ir.spec import PartitionSpec
from cost_models.hardware import Cluster
from cost_models.streams import overlap_of, simulate_streams
from passes.driver.plan_options import PlanOptions
from passes.lowering.in_flight import buckets_of
from passes.lowering.lower import Lower, result_key
from passes.lowering.lower_program import lower_prepared
from passes.lowering.lowering_options import LoweringOptions
from passes.memory.lowered_memory import StepMemory, step_memory
from passes.memory.storages import STATE
from passes.planning.build_assignment import PlanningProblem
from passes.planning.cover import cover
from passes.prediction.name_layouts import plan_of_parameter
from passes.prediction.predict import predict
from passes.prediction.segment_step import folded_step, repeated_step
from passes.prediction.walk_program import WalkedStep, walk_program
from passes.strategies.price import StepPrice, local_bytes
from passes.strategies.price_nodes import NodePrices


@dataclass(frozen=True, slots=True)
class LoweredPlan:
    """A plan, and the program that it was predicted from.

    Args:
        plan: the plan.
        phased: what `lower_program` makes of it, without kernels; None: it was predicted with them, or without blocks.
    """

    plan: Plan
    phased: PhasedProgram | None = None


def lowered_plan(
    planning: PlanningProblem,
    choice: Sequence[int],
    objective: float,
    lower_bound: float | None,
    cluster: Cluster,
    options: PlanOptions,
) -> LoweredPlan:
    """The plan of a choice of one option per variable of `planning`, and the program that it is predicted from.

    `objective` is in seconds.
    """
    plan = _plan_of_operators(planning, choice, objective, lower_bound, cluster, options)
    if not options.with_kernels:
        plan = replace(plan, predicted=replace(UNKNOWN, memory_breakdown={STATE: _state_beside(planning, choice)}))
        walked, phased = _walked(planning, plan, choice, cluster, options)
        memory = _memory(planning, choice, phased)
        predicted = predict(planning, choice, dispatch=options.dispatch, memory=memory, walked=walked, record=True)
        return LoweredPlan(replace(plan, predicted=predicted), None if planning.elided.sites else phased)
    memory = memory_of_choice(planning, choice, options)
    plan = replace(plan, predicted=predict(planning, choice, dispatch=options.dispatch, memory=memory, record=True))
    kernels = kernels_of(plan, planning.space.program, cluster, planning.elided.site_counts())
    predicted = predict(planning, choice, kernels, dispatch=options.dispatch, memory=memory, record=True)
    kernels = replace(kernels, breakdown_without=plan.predicted.breakdown)
    return LoweredPlan(replace(plan, predicted=replace(predicted, kernels=kernels)))


def memory_of_choice(planning: PlanningProblem, choice: Sequence[int], options: PlanOptions) -> StepMemory:
    """Memory of each rank under a choice, before collectives are under way; lowered once, and kept with the problem."""
    known: dict[tuple[int, ...], StepMemory] = planning.derived.setdefault(_MEMORY, {})
    key = tuple(choice)
    if key not in known:
        cluster = planning.prices.cluster
        plan = _plan_of_operators(planning, choice, 0.0, None, cluster, options)
        known[key] = _memory(planning, choice, lower_prepared(planning.space.program, plan, cluster, _PLAINLY))
    return known[key]


def peak_under(options: PlanOptions) -> Callable[[PlanningProblem, Sequence[int]], float]:
    """The count of bytes at the peak of a choice of a problem, see `memory_of_choice`."""
    return lambda planning, choice: memory_of_choice(planning, choice, options).peak_bytes


_MEMORY, _PLAINLY = "memory", LoweringOptions(with_overlap=False)


def _memory(planning: PlanningProblem, choice: Sequence[int], phased: PhasedProgram) -> StepMemory:
    """Memory of a lowered program, and of optimizer state that is not in the program."""
    parts = step_memory(phased, planning.liveness.micro_batches, planning.liveness.load).parts
    return StepMemory({**parts, STATE: parts[STATE] + _state_beside(planning, choice)})


def _state_beside(planning: PlanningProblem, choice: Sequence[int]) -> int:
    """Bytes of optimizer state that is not in the program."""
    space, counts = planning.space, planning.elided.site_counts()
    total = 0
    for name in planning.liveness.parameters:
        spec = planning.strategy(name, choice).outputs[0]
        total += counts.get(name, 1) * local_bytes(space.sites[name].results[0], spec, space.mesh)
    return round(planning.liveness.state_bytes_per_parameter_byte * total)


def kernels_of(plan: Plan, prepared: Program, cluster: Cluster, counts: Mapping[str, int]) -> Kernels:
    """The Triton kernels that a plan runs with; nothing is written for them.

    Args:
        plan: the plan.
        prepared: its program, as `prepare_for` gives it.
        cluster: what it is priced for.
        counts: node to how often it runs, where that is not once (`Elided.site_counts`).
    """
    from passes.lowering.price_kernels import price_kernels  # imports triton

    return price_kernels(Lower(plan, StepPrice(cluster, plan.mesh))(prepared), cluster.device, counts)


def rough_step_s(planning: PlanningProblem, choice: Sequence[int], cluster: Cluster, options: PlanOptions) -> float:
    """Seconds of a choice's step, about: what `lowered_plan` predicts, without lowering it."""
    is_lowered = not options.with_kernels
    largest_bytes = buckets_of(cluster).largest_bytes if is_lowered else None
    segments = repeated_step(planning, choice, planning.liveness.micro_batches, largest_bytes=largest_bytes)
    overlap, dispatch_s = overlap_of(cluster) if is_lowered else None, cluster.device.dispatch(options.dispatch)
    return simulate_streams(segments, overlap, dispatch_s=dispatch_s).total_s


def _walked(
    planning: PlanningProblem, plan: Plan, choice: Sequence[int], cluster: Cluster, options: PlanOptions
) -> tuple[WalkedStep, PhasedProgram]:
    """The step of a plan as its lowered program says; and that program.

    A program without its inner blocks is lowered without overlap, and nothing hoisted: what fits is not that of the
    whole. Its step is that of the planning problem, as `folded_step` writes it down, with what travels in buckets.
    """
    micro_batches, is_whole = planning.liveness.micro_batches, not planning.elided.sites
    lowering = LoweringOptions(
        with_overlap=is_whole,
        reduce_dtype=options.reduce_dtype,
        micro_batches=micro_batches if is_whole else 1,
    )
    phased = lower_prepared(planning.space.program, plan, cluster, lowering)
    prices = NodePrices(cluster, plan.mesh)
    if is_whole:
        walked = walk_program(phased, prices, micro_batches)
    else:
        walked = folded_step(planning, choice, phased, prices, micro_batches, buckets_of(cluster).largest_bytes)
    return walked, phased


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
