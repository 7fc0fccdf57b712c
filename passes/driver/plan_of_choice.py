"""The plan that a choice of the planning problem stands for, predicted from its lowered program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoshard.ir.kernels import NO_KERNELS, Kernels
from autoshard.ir.lowered import PhasedProgram
from autoshard.ir.plan import Plan
from autoshard.ir.plan_parts import UNKNOWN, NodePlan, Prediction
from autoshard.ir.program import OWNERS, InputKind, OutputSlot, Program, describe
from autoshard.ir.repeat import names_alike
from autoshard.ir.spec import PartitionSpec
from cost_models.hardware import Cluster
from passes.driver.plan_options import PlanOptions
from passes.lowering.lower import result_key
from passes.lowering.lower_program import lower_prepared
from passes.lowering.lowering_options import LoweringOptions
from passes.memory.lowered_memory import peak_bytes
from passes.planning.build_assignment import PlanningProblem
from passes.planning.cover import cover
from passes.planning.exact_memory import exact_memory
from passes.prediction.name_layouts import plan_of_parameter
from passes.prediction.predict import memory_at_peak, predict
from passes.prediction.walk_program import WalkedStep, walk_program
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
    memory = exact_memory(planning, choice)
    plan = replace(plan, predicted=replace(UNKNOWN, memory_breakdown=memory_at_peak(memory)))
    lowering = LoweringOptions(reduce_dtype=options.reduce_dtype, micro_batches=planning.liveness.micro_batches)

    def predicted(walked: WalkedStep, kernels: Kernels = NO_KERNELS) -> Prediction:
        return predict(planning, choice, walked, memory, kernels, dispatch=options.dispatch)

    walked, phased, _ = _walked(planning.space.program, plan, cluster, lowering)
    without = predicted(walked)
    if not options.with_kernels:
        is_whole = not planning.elided.sites
        return LoweredPlan(replace(plan, predicted=without), phased if is_whole else None)
    with_kernels, _, marked = _walked(planning.space.program, plan, cluster, _with_priced_kernels(lowering))
    kernels = replace(marked, breakdown_without=without.breakdown)
    step = replace(with_kernels, passes_bytes=walked.passes_bytes)
    return LoweredPlan(replace(plan, predicted=predicted(step, kernels)))


def _with_priced_kernels(lowering: LoweringOptions) -> LoweringOptions:
    """Options with kernels that are priced, and not written."""
    return replace(lowering, with_kernels=True, prices_kernels=True, with_native=False)


def kernels_of(plan: Plan, prepared: Program, cluster: Cluster) -> Kernels:
    """The Triton kernels that a plan runs with; none are written.

    Args:
        plan: the plan.
        prepared: its program, as `prepare_for` gives it.
        cluster: what it is priced for.
    """
    return _walked(prepared, plan, cluster, _with_priced_kernels(LoweringOptions(with_overlap=False)))[2]


def _walked(
    prepared: Program, plan: Plan, cluster: Cluster, lowering: LoweringOptions
) -> tuple[WalkedStep, PhasedProgram, Kernels]:
    """The step of a plan as its lowered program says; that program; and the kernels that are priced."""
    made: dict[str, Any] = {}
    lowering = replace(lowering, on_pass=lambda one, _, result: made.update({type(one).__name__: result}))
    phased = lower_prepared(prepared, plan, cluster, lowering)
    walked = walk_program(phased, NodePrices(cluster, plan.mesh), lowering.micro_batches)
    plain, peak = (peak_bytes(item, micro_batches=lowering.micro_batches) for item in (made["SplitPhases"], phased))
    kernels = NO_KERNELS
    if lowering.prices_kernels:
        from passes.lowering.price_kernels import marked_kernels  # imports triton

        kernels = marked_kernels(made["PriceKernels"])
    return replace(walked, passes_bytes=peak - plain), phased, kernels


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
