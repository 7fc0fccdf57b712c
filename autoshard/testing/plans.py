"""Hypothesis strategy for plans: any legal one, not only the one that the planner would choose.

Legal is any strategy of each node that its rule admits, and any recomputation of whose values the operands are there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from functools import cache, lru_cache, partial

import numpy as np
from hypothesis import strategies as st

from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.precision import PRECISIONS, effective_precision
from autoshard.ir.program import Program
from autoshard.ir.spec import Reduction
from autoshard.rules.enumeration import Strategy
from autoshard.testing.blocks import Draw
from autoshard.testing.decided_plans import Deciding, deciding_of, laptop, plan_of_decisions, unfolded_problem
from autoshard.testing.programs import DrawnProgram
from autoshard.testing.whole_step import trace_training
from cost_models.hardware import Cluster
from passes.memory.liveness import UPDATE
from passes.planning.build_assignment import PlanningProblem

_BUDGETS = (None, 1, 10**12)
"""Bytes of memory: what parameters decide alone is then held over micro-batches beside the step's peak, not, or all."""


def plans(program: DrawnProgram | Program, mesh: Mesh, *, precision: str | None = None) -> st.SearchStrategy[Plan]:
    """Legal plans of a program: for each node any strategy that its rule admits; half of them recompute and offload.

    The program is traced, and what its nodes may do is listed, once for all plans that are drawn of it.

    Args:
        program: a drawn program, which is traced, or a traced one.
        mesh: the mesh to plan for; ranks are priced as shares of a laptop.
        precision: what the program computes in: a drawn one is traced so, a traced one has been.
    """
    is_added_up = False
    if isinstance(program, DrawnProgram):
        is_added_up = program.whole_step is not None and program.whole_step.micro_batches > 1
        precision = effective_precision(program.model, precision)
        program = traced_call(program, precision)
    cluster = laptop(mesh)
    planning = unfolded_problem(program, mesh, cluster)
    deciding = cache(partial(deciding_of, planning, cluster))
    drawn = st.composite(_draw_plan)(planning, deciding, cluster, is_added_up)
    return drawn.map(lambda plan: dataclasses.replace(plan, precision=precision))


@lru_cache(maxsize=1)
def traced_call(program: DrawnProgram, precision: str | None) -> Program:
    """The program of a call, or of a micro-batch of a whole step; the last one is kept, for `check_plan(traced=)`."""
    dtype = None if precision is None else PRECISIONS[precision]
    return trace_training(program.model, program.inputs, {}, program.whole_step, dtype)


def _draw_plan(
    draw: Draw, planning: PlanningProblem, deciding: Callable[[bool], Deciding], cluster: Cluster, is_added_up: bool
) -> Plan:
    gradients = _read_by_update(planning) if is_added_up else ()

    def pick(variable: int, options: np.ndarray) -> int:
        site = planning.space.sites[planning.members[variable][0]]
        if site.name in gradients:
            options = options[[_is_sum(site.strategies[option % len(site.strategies)]) for option in options]]
        return int(options[draw(st.integers(0, len(options) - 1))])

    plan = plan_of_decisions(planning, deciding(draw(st.booleans())), cluster, pick)
    return dataclasses.replace(plan, memory_budget=draw(st.sampled_from(_BUDGETS))) if is_added_up else plan


def _read_by_update(planning: PlanningProblem) -> Collection[str]:
    """The sites whose results an update reads, which are added up over micro-batches."""
    sites, links = planning.space.sites, planning.space.links
    return {link.tail for link in links if sites[link.head].phase == UPDATE and sites[link.tail].phase != UPDATE}


def _is_sum(strategy: Strategy) -> bool:
    """Whether what is yielded is whole or awaits sums."""
    return all(reduction is Reduction.SUM for spec in strategy.outputs for _, reduction in spec.partial)
