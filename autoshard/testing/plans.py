"""Hypothesis strategy for plans: any plan whose nodes have strategies that their rules admit.

The planner's plan is one of these plans. In each plan, the operands from which a value is recomputed are available.
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
from autoshard.testing.decided_plans import Decisions, decisions_of, laptop, plan_of_decisions, unfolded_problem
from autoshard.testing.programs import DrawnProgram
from autoshard.testing.whole_step import trace_training
from cost_models.hardware import Cluster
from passes.memory.liveness import UPDATE
from passes.planning.build_assignment import PlanningProblem

_BUDGETS = (None, 1, 10**12)
"""Memory budgets to draw from, in bytes; None: no budget.

Values that depend on parameters alone are kept over micro-batches if the budget allows: 1 byte keeps none of them,
10¹² bytes keep all.
"""


def plans(program: DrawnProgram | Program, mesh: Mesh, *, precision: str | None = None) -> st.SearchStrategy[Plan]:
    """Generate plans of a program in which each node has any strategy that its sharding rule admits.

    Half of the plans may recompute or offload values. The program is traced once, and its nodes' strategies are listed
    once, for all plans.

    Args:
        program: a generated program, which is traced here, or a traced one.
        mesh: the mesh to plan for.
        precision: the compute precision, such as "bf16". A traced program must have been traced with it. None: the
            model's own dtypes.
    """
    is_added_up = False
    if isinstance(program, DrawnProgram):
        is_added_up = program.whole_step is not None and program.whole_step.micro_batches > 1
        precision = effective_precision(program.model, precision)
        program = traced_call(program, precision)
    cluster = laptop(mesh)
    planning = unfolded_problem(program, mesh, cluster)
    decisions = cache(partial(decisions_of, planning, cluster))
    drawn = st.composite(_draw_plan)(planning, decisions, cluster, is_added_up)
    return drawn.map(lambda plan: dataclasses.replace(plan, precision=precision))


@lru_cache(maxsize=1)
def traced_call(program: DrawnProgram, precision: str | None) -> Program:
    """Return the traced program of a generated model's call; for a training step, that of one micro-batch.

    Pass it to `check_plan(traced=)`, so that the program is traced once. Only the last result is cached.

    Args:
        program: a result of `programs()`.
        precision: the compute precision, such as "bf16"; None: the model's own dtypes.
    """
    dtype = None if precision is None else PRECISIONS[precision]
    return trace_training(program.model, program.inputs, {}, program.whole_step, dtype)


def _draw_plan(
    draw: Draw, planning: PlanningProblem, decisions: Callable[[bool], Decisions], cluster: Cluster, is_added_up: bool
) -> Plan:
    gradients = _read_by_update(planning) if is_added_up else ()

    def pick(variable: int, options: np.ndarray) -> int:
        site = planning.space.sites[planning.members[variable][0]]
        if site.name in gradients:
            options = options[[_is_sum(site.strategies[option % len(site.strategies)]) for option in options]]
        return int(options[draw(st.integers(0, len(options) - 1))])

    plan = plan_of_decisions(planning, decisions(draw(st.booleans())), cluster, pick)
    return dataclasses.replace(plan, memory_budget=draw(st.sampled_from(_BUDGETS))) if is_added_up else plan


def _read_by_update(planning: PlanningProblem) -> Collection[str]:
    """Return the names of the nodes whose results the optimizer's update reads: gradients summed over micro-batches."""
    sites, links = planning.space.sites, planning.space.links
    return {link.tail for link in links if sites[link.head].phase == UPDATE and sites[link.tail].phase != UPDATE}


def _is_sum(strategy: Strategy) -> bool:
    """Whether all results of a strategy are whole or partial sums. Partial maxima, minima and products are excluded."""
    return all(reduction is Reduction.SUM for spec in strategy.outputs for _, reduction in spec.partial)
