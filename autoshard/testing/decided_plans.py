"""Plans whose strategies are chosen one by one, in program order: greedily by a score, or drawn by Hypothesis.

A site is a node with a choice of strategies. The planning problem has one decision variable for each site.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from autoshard.ir.mesh import Mesh
from autoshard.ir.offload import Offload
from autoshard.ir.plan import Plan
from autoshard.ir.program import Program
from autoshard.ir.recompute import Recompute
from autoshard.rules.enumeration import Strategy
from cost_models.device import HostLink
from cost_models.hardware import Cluster, node_type
from passes.driver.plan_of_choice import lowered_plan
from passes.driver.plan_options import PlanOptions
from passes.lowering.lower_program import prepare
from passes.memory.liveness import find_lifetimes
from passes.planning.build_assignment import PlanningProblem, build_problem
from passes.recomputation.recompute_options import OFFLOADED, RECOMPUTED, RecomputeOptions, find_options
from passes.recomputation.recompute_problem import RecomputeProblem, build_recompute_problem
from passes.recomputation.with_restored import host_bytes, with_restored
from passes.solver.assignment import Assignment
from passes.strategies.enumerate_strategies import EnumerateStrategies, Site
from passes.strategies.price import Prices


def greedy_plan(program: Program, mesh: Mesh, score: Callable[[Site, Strategy], float]) -> Plan:
    """Return a plan made in program order: each site takes the strategy of highest `score` among those still possible.

    A site is a node with a choice of strategies. A strategy is possible if it agrees with the earlier choices.
    """
    planning = unfolded_problem(program, mesh, laptop(mesh))

    def pick(variable: int, options: np.ndarray) -> int:
        site = planning.space.sites[planning.members[variable][0]]
        return int(max(options, key=lambda option: score(site, site.strategies[int(option)])))

    return decided_plan(planning, laptop(mesh), pick)


def laptop(mesh: Mesh) -> Cluster:
    """Return a cluster of laptop CPUs, one for each rank of `mesh`. Plans can offload over its links to host memory."""
    node = node_type("cpu_laptop")
    linked = dataclasses.replace(node.device, host_link=HostLink(1e10, 1e10))
    return Cluster(node.with_device(linked), nodes=1, devices_per_node=mesh.size)


def unfolded_problem(program: Program, mesh: Mesh, cluster: Cluster) -> PlanningProblem:
    """Return the planning problem with one variable for each node that has a choice of strategies.

    Equal layers have separate variables, so a plan may treat them differently.
    """
    space = EnumerateStrategies(mesh)(prepare(program))
    alone = {name: name for name in space.sites}
    return build_problem(space, Prices(cluster, mesh), find_lifetimes(space, 0.0), alone)


@dataclass(frozen=True, slots=True)
class Decisions:
    """The choices to make for a plan.

    Args:
        options: the activation policies (save, recompute, offload) that each value may have.
        problem: the problem whose variables choose strategies, and activation policies if there are any to choose.
    """

    options: RecomputeOptions
    problem: RecomputeProblem


def decisions_of(planning: PlanningProblem, cluster: Cluster, recompute: bool) -> Decisions:
    """Return the choices to make for a plan: strategies, and with `recompute` also values to recompute or offload."""
    has_host = cluster.device.host_link is not None
    every = find_options(planning, least_share=0.0, offload=has_host)
    options = every if recompute else dataclasses.replace(every, policies={})
    return Decisions(options, build_recompute_problem(planning, options, with_memory=False))


def decided_plan(
    planning: PlanningProblem, cluster: Cluster, pick: Callable[[int, np.ndarray], int], *, recompute: bool = False
) -> Plan:
    """Return a plan whose variables are decided by `pick`, one by one in program order.

    Args:
        planning: the problem of choosing strategies. `recompute` adds the activation policies to its options.
        cluster: the hardware for which the plan is priced. Values are offloaded only if it has a link to host memory.
        pick: takes the index of a variable, and the indices of the options that agree with earlier choices. It returns
            one of these indices. The options are the variable's strategies. With `recompute`, the list of strategies is
            repeated for each activation policy of the variable, first for the policy that saves values.
        recompute: whether values may be recomputed or offloaded.
    """
    return plan_of_decisions(planning, decisions_of(planning, cluster, recompute), cluster, pick)


def plan_of_decisions(
    planning: PlanningProblem, decisions: Decisions, cluster: Cluster, pick: Callable[[int, np.ndarray], int]
) -> Plan:
    """Return the plan in which `pick` makes each of `decisions`; the arguments are those of `decided_plan`."""
    options, problem = decisions.options, decisions.problem
    choice: dict[int, int] = {}
    for variable in range(len(problem.assignment.costs)):
        choice[variable] = pick(variable, np.flatnonzero(_allowed(problem.assignment, variable, choice)))
    decided = tuple(choice[variable] for variable in range(len(choice)))
    restored, strategies = problem.restored(decided), problem.without_policies(decided)
    running, counts = with_restored(planning, restored), planning.counts()
    cost = running.assignment.cost_of(strategies)
    plan = lowered_plan(running, strategies, cost, None, cluster, PlanOptions()).plan
    return dataclasses.replace(
        plan,
        recompute=Recompute(restored.recomputed, options.candidates(RECOMPUTED, counts)),
        offload=Offload(
            restored.offloaded, options.candidates(OFFLOADED, counts), int(host_bytes(running, strategies))
        ),
    )


def _allowed(assignment: Assignment, variable: int, choice: Mapping[int, int]) -> np.ndarray:
    cost = assignment.costs[variable]
    for edge in assignment.edges:
        if edge.head == variable and edge.tail in choice:
            cost = cost + edge.cost[choice[edge.tail], :]
        elif edge.tail == variable and edge.head in choice:
            cost = cost + edge.cost[:, choice[edge.head]]
    return np.isfinite(cost)
