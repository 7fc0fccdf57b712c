"""Legal plans that split, pad or recompute as much as a greedy choice in program order can."""

from __future__ import annotations

from functools import partial

import numpy as np

from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.program import Program
from autoshard.rules.enumeration import Strategy
from autoshard.testing.decided_plans import decided_plan, greedy_plan, unfolded_problem
from cost_models.hardware import Cluster
from passes.strategies.enumerate_strategies import Site, operands_of


def most_uneven_plan(program: Program, mesh: Mesh) -> Plan:
    """Return a legal plan with as many uneven splits as a greedy choice in program order finds, to test padding."""
    return greedy_plan(program, mesh, partial(_uneven_splits, mesh))


def most_split_plan(program: Program, mesh: Mesh) -> Plan:
    """Return a legal plan with as many splits as a greedy choice in program order finds.

    The planner would not split small calls, because a collective costs more than a repeated small call.
    """
    return greedy_plan(program, mesh, _splits)


def most_recomputed_plan(program: Program, mesh: Mesh) -> Plan:
    """Return a legal plan that recomputes all allowed values as late as possible, with greedily the most splits."""
    cluster = Cluster("cpu_laptop", nodes=1, devices_per_node=mesh.size)  # without a host to offload to
    planning = unfolded_problem(program, mesh, cluster)

    def pick(variable: int, options: np.ndarray) -> int:
        site = planning.space.sites[planning.members[variable][0]]
        count = len(site.strategies)

        def rank(option: int) -> tuple[int, int]:
            return option // count, _splits(site, site.strategies[option % count])

        return int(max(options, key=rank))

    return decided_plan(planning, cluster, pick, recompute=True)


def _splits(_: Site, strategy: Strategy) -> int:
    """Count the axes that split dims of operands and results under a strategy."""
    specs = (*strategy.inputs, *strategy.outputs)
    return sum(len(spec.axes_of(dim)) for spec in specs for dim in range(len(spec.dims)))


def _uneven_splits(mesh: Mesh, site: Site, strategy: Strategy) -> int:
    """Count the operands and results that have padding under a strategy."""
    operands = [] if site.node is None else [operand.meta["val"].shape for operand in operands_of(site.node)]
    shapes = [*operands, *(result.shape for result in site.results)]
    specs = (*strategy.inputs, *strategy.outputs) if site.node is not None else ()
    return sum(not spec.is_even(shape, mesh) for shape, spec in zip(shapes, specs, strict=True))
