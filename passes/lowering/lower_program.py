"""Lower a traced program by a plan to the program that each rank runs, with the passes of `passes.lowering.order`."""

from __future__ import annotations

from dataclasses import replace

from autoshard.ir.lowered import PhasedProgram
from autoshard.ir.plan import Plan
from autoshard.ir.program import InputKind, Program
from cost_models.hardware import Cluster
from passes.lowering.lowering_options import USUAL, LoweringOptions
from passes.lowering.order import Moment, run_at
from passes.lowering.overlap import overlapped

_PREPARED = "autoshard: as traced, and prepared"


def prepare(program: Program) -> Program:
    """Return the program in canonical form, with fan-outs, as it is planned.

    The result is cached with the traced graph.
    """
    traced, prepared = program.graph_module.meta.get(_PREPARED, (None, None))
    if traced is not program:
        prepared = run_at(Moment.TRACED, program)
        program.graph_module.meta[_PREPARED] = (program, prepared)
    return prepared


def prepare_for(program: Program, plan: Plan) -> Program:
    """Return the prepared program, with the recomputation and the offloads of its plan inserted.

    Raises:
        PlanMismatchError: the plan belongs to another program.
    """
    return run_at(Moment.PLANNED, prepare(program), LoweringOptions(plan=plan))


def lower_program(
    program: Program, plan: Plan, cluster: Cluster | None = None, options: LoweringOptions = USUAL
) -> PhasedProgram:
    """Lower a program by a plan, and cut it into forward, backward and update.

    Args:
        cluster: the hardware. Its times decide between several ways to reshard a value. None: bytes sent decide.

    Raises:
        PlanMismatchError: the plan belongs to another program.
    """
    if options.on_pass is None:
        prepared = prepare_for(program, plan)
    else:
        prepared = run_at(Moment.PLANNED, run_at(Moment.TRACED, program, options), replace(options, plan=plan))
    return lower_prepared(prepared, plan, cluster, options)


def lower_prepared(
    prepared: Program, plan: Plan, cluster: Cluster | None = None, options: LoweringOptions = USUAL
) -> PhasedProgram:
    """Lower a program that `prepare_for` has returned.

    The other arguments and the result are those of `lower_program`.
    """
    options = replace(options, plan=plan, cluster=cluster, memory_bytes=_room_of(prepared, plan))
    phased = run_at(Moment.LOWERED, prepared if options.lowered is None else options.lowered, options)
    return overlapped(phased, options) if options.with_overlap else phased


def _room_of(program: Program, plan: Plan) -> float | None:
    """Return the bytes that a program's values may take on each rank, or None without a memory budget.

    They are the plan's memory budget, less optimizer state that is no input of the program.
    """
    if plan.memory_budget is None or program.inputs_of(InputKind.STATE):
        return plan.memory_budget
    return plan.memory_budget - plan.predicted.memory_breakdown.get("optimizer state", 0)
