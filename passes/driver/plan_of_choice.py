"""Make a plan from a choice of strategies, lower it, and predict its time and memory from the lowered program.

A choice has the index of one option for each variable of the planning problem.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autoshard.ir.kernels import NO_KERNELS, Kernels
from autoshard.ir.lowered import LoweredProgram, PhasedProgram
from autoshard.ir.plan import Plan
from autoshard.ir.plan_parts import UNKNOWN, NodePlan, Prediction
from autoshard.ir.program import OWNERS, InputKind, OutputSlot, Program, describe
from autoshard.ir.repeat import names_represented_by
from autoshard.ir.spec import PartitionSpec
from cost_models.hardware import Cluster
from passes.driver.plan_options import PlanOptions
from passes.lowering.lower import Lower, result_key
from passes.lowering.lower_program import lower_prepared
from passes.lowering.lowering_options import LoweringOptions
from passes.memory.lowered_memory import StepMemory, step_memory
from passes.memory.storages import STATE
from passes.planning.build_assignment import PlanningProblem
from passes.planning.cover import cover
from passes.prediction.name_layouts import plan_of_parameter
from passes.prediction.predict import predict
from passes.prediction.walk_program import WalkedStep, walk_program
from passes.strategies.price import StepPrice, local_bytes
from passes.strategies.price_nodes import NodePrices


@dataclass(frozen=True, slots=True)
class LoweredPlan:
    """A plan, and the lowered program that its prediction was read from.

    `phased` has no Triton kernels. It is None if the prediction has kernels or leaves out blocks.
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
    """Return the plan of a choice with its prediction, and the lowered program from which the prediction was read.

    Args:
        choice: one option for each variable of `planning`.
        objective: the sum of the choice's prices in the search, in seconds.
        lower_bound: a lower bound of this sum for all choices, in seconds; None if no bound is known.
    """
    plan = _plan_of_operators(planning, choice, objective, lower_bound, cluster, options)
    plan = replace(
        plan,
        predicted=replace(UNKNOWN, memory_breakdown={STATE: _state_beside(planning, choice)}),
        operators=cover(planning, choice),
    )
    lowered = _lowered(planning, choice, plan, cluster)
    load, micro_batches = planning.liveness.load, planning.liveness.micro_batches
    lowering = LoweringOptions(
        reduce_dtype=options.reduce_dtype, micro_batches=micro_batches, load=load, lowered=lowered
    )
    walked, phased, _ = _walked(planning.space.program, plan, cluster, lowering)
    memory = _memory(planning, choice, phased)

    def predicted(walked: WalkedStep, kernels: Kernels = NO_KERNELS) -> Prediction:
        return predict(planning, choice, walked, memory, kernels, dispatch=options.dispatch)

    without = predicted(walked)
    if not options.with_kernels:
        is_whole = not planning.repeated.sites
        return LoweredPlan(replace(plan, predicted=without), phased if is_whole else None)
    with_kernels, _, marked = _walked(planning.space.program, plan, cluster, _with_priced_kernels(lowering))
    kernels = replace(marked, breakdown_without=without.breakdown)
    return LoweredPlan(replace(plan, predicted=predicted(with_kernels, kernels)))


def _with_priced_kernels(lowering: LoweringOptions) -> LoweringOptions:
    return replace(lowering, with_kernels=True, prices_kernels=True, with_native=False)


def memory_of_choice(planning: PlanningProblem, choice: Sequence[int], options: PlanOptions) -> StepMemory:
    """Return the memory of each rank under a choice, without overlap of collectives. Each choice is lowered once."""
    known: dict[tuple[int, ...], StepMemory] = planning.derived.setdefault(_MEMORY, {})
    key = tuple(choice)
    if key not in known:
        cluster = planning.prices.cluster
        plan = _plan_of_operators(planning, choice, 0.0, None, cluster, options)
        lowering = replace(_PLAINLY, lowered=_lowered(planning, choice, plan, cluster))
        known[key] = _memory(planning, choice, lower_prepared(planning.space.program, plan, cluster, lowering))
    return known[key]


def _lowered(planning: PlanningProblem, choice: Sequence[int], plan: Plan, cluster: Cluster) -> LoweredProgram:
    """Return the lowered program of `plan`, the plan of `choice`, as it is right after the pass `Lower`.

    `planning` caches the last `_MOST_LOWERED` results, by choice.
    """
    known: dict[tuple[int, ...], LoweredProgram] = planning.derived.setdefault(_LOWERED, {})
    key = tuple(choice)
    if key not in known:
        if len(known) >= _MOST_LOWERED:
            del known[next(iter(known))]
        known[key] = Lower(plan, StepPrice(cluster, plan.mesh))(planning.space.program)
    return known[key]


def peak_under(options: PlanOptions) -> Callable[[PlanningProblem, Sequence[int]], float]:
    """Return a function from a planning problem and a choice to the peak bytes of a rank (`memory_of_choice`)."""
    return lambda planning, choice: memory_of_choice(planning, choice, options).peak_bytes


_MEMORY, _LOWERED, _MOST_LOWERED = "memory", "lowered", 4
_PLAINLY = LoweringOptions(with_overlap=False)


def _memory(planning: PlanningProblem, choice: Sequence[int], phased: PhasedProgram) -> StepMemory:
    """Return the memory of a lowered program, plus optimizer state that the program lacks."""
    parts = step_memory(phased, planning.liveness.micro_batches, planning.liveness.load).parts
    return StepMemory({**parts, STATE: parts[STATE] + _state_beside(planning, choice)})


def _state_beside(planning: PlanningProblem, choice: Sequence[int]) -> int:
    """Return the bytes on a rank of the optimizer state that the program lacks because the update is not traced."""
    space, counts = planning.space, planning.repeated.site_counts()
    total = 0
    for name in planning.liveness.parameters:
        spec = planning.strategy(name, choice).outputs[0]
        total += counts.get(name, 1) * local_bytes(space.sites[name].results[0], spec, space.mesh)
    return round(planning.liveness.state_bytes_per_parameter_byte * total)


def kernels_of(plan: Plan, prepared: Program, cluster: Cluster) -> Kernels:
    """Return the Triton kernels that would run in a plan's program, with their predicted times.

    No kernels are generated. `prepared` is the result of `prepare_for`.
    """
    return _walked(prepared, plan, cluster, _with_priced_kernels(LoweringOptions(with_overlap=False)))[2]


def _walked(
    prepared: Program, plan: Plan, cluster: Cluster, lowering: LoweringOptions
) -> tuple[WalkedStep, PhasedProgram, Kernels]:
    made: dict[str, PhasedProgram] = {}
    if lowering.prices_kernels:
        lowering = replace(lowering, on_pass=lambda one, _, result: made.update({type(one).__name__: result}))
    phased = lower_prepared(prepared, plan, cluster, lowering)
    walked = walk_program(phased, NodePrices(cluster, plan.mesh), lowering.micro_batches)
    kernels = NO_KERNELS
    if lowering.prices_kernels:
        from passes.lowering.price_kernels import marked_kernels  # imports triton

        kernels = marked_kernels(made["PriceKernels"])
    return walked, phased, kernels


def _plan_of_operators(
    planning: PlanningProblem,
    choice: Sequence[int],
    objective: float,
    lower_bound: float | None,
    cluster: Cluster,
    options: PlanOptions,
) -> Plan:
    """Return the plan of a choice, as yet without Triton kernels and without a prediction.

    The arguments are those of `lowered_plan`.
    """
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
            for whole in (replace(slot, name=name) for name in names_represented_by(program.repeats, slot.name))
        },
        parameters={
            name: place
            for slot in program.inputs_of(InputKind.PARAMETER)
            for place in (plan_of_parameter(planning, choice, slot),)
            for name in names_represented_by(program.repeats, slot.name)
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
        repeats=program.repeats,
    )


def _result_spec(planning: PlanningProblem, choice: Sequence[int], slot: OutputSlot) -> PartitionSpec:
    if slot.kind not in OWNERS:
        return planning.strategy(slot.name, choice).inputs[0]
    return planning.strategy(planning.space.owner(slot), choice).outputs[0]
