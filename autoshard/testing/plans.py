"""Hypothesis strategy for plans: any legal one, not only the one that the planner would choose.

Legal is any strategy of each node that its rule admits, and any recomputation of whose values the operands are there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache, partial

import numpy as np
from hypothesis import strategies as st

from autoshard.ir.mesh import Mesh
from autoshard.ir.offload import Offload
from autoshard.ir.plan import Plan
from autoshard.ir.precision import PRECISIONS, effective_precision
from autoshard.ir.program import Program
from autoshard.ir.recompute import Recompute
from autoshard.ir.spec import Reduction
from autoshard.rules.enumeration import Strategy
from autoshard.testing.blocks import Draw
from autoshard.testing.programs import DrawnProgram
from autoshard.testing.whole_step import trace_training
from cost_models.device import HostLink
from cost_models.hardware import Cluster, node_type
from passes.memory.liveness import UPDATE, find_lifetimes
from passes.pipeline import PlanOptions, plan_of_choice, prepare
from passes.planning.build_assignment import PlanningProblem, build_problem
from passes.recomputation.recompute_options import OFFLOADED, RECOMPUTED, RecomputeOptions, find_options
from passes.recomputation.recompute_problem import RecomputeProblem, build_recompute_problem
from passes.recomputation.with_again import host_bytes, with_again
from passes.solver.assignment import Assignment
from passes.strategies.enumerate_strategies import EnumerateStrategies, Site, operands_of
from passes.strategies.price import Prices


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
    cluster = _laptop(mesh)
    planning = _unfolded_problem(program, mesh, cluster)
    deciding = cache(partial(_deciding, planning, cluster))
    drawn = st.composite(_draw_plan)(planning, deciding, cluster, is_added_up)
    return drawn.map(lambda plan: dataclasses.replace(plan, precision=precision))


@lru_cache(maxsize=1)
def traced_call(program: DrawnProgram, precision: str | None) -> Program:
    """The program of a call, or of a micro-batch of a whole step; the last one is kept, for `check_plan(traced=)`."""
    dtype = None if precision is None else PRECISIONS[precision]
    return trace_training(program.model, program.inputs, {}, program.whole_step, dtype)


def greedy_plan(program: Program, mesh: Mesh, score: Callable[[Site, Strategy], float]) -> Plan:
    """A legal plan with the strategy of the highest score at each site, as those before it in the program leave it."""
    planning = _unfolded_problem(program, mesh, _laptop(mesh))

    def pick(variable: int, options: np.ndarray) -> int:
        site = planning.space.sites[planning.members[variable][0]]
        return int(max(options, key=lambda option: score(site, site.strategies[int(option)])))

    return decided_plan(planning, _laptop(mesh), pick)


def most_uneven_plan(program: Program, mesh: Mesh) -> Plan:
    """A legal plan with as many uneven splits as a greedy choice in program order finds: what padding is tested on."""
    return greedy_plan(program, mesh, partial(_uneven_splits, mesh))


def most_split_plan(program: Program, mesh: Mesh) -> Plan:
    """A legal plan with as many splits as a greedy choice in program order finds.

    The planner repeats calls that are too small to be worth a collective, as those of most tests are.
    """
    return greedy_plan(program, mesh, _splits)


def most_recomputed_plan(program: Program, mesh: Mesh) -> Plan:
    """A legal plan that recomputes what it may, as late as it may; of strategies, greedily, those that split most."""
    cluster = Cluster("cpu_laptop", nodes=1, devices_per_node=mesh.size)  # without a host to offload to
    planning = _unfolded_problem(program, mesh, cluster)

    def pick(variable: int, options: np.ndarray) -> int:
        site = planning.space.sites[planning.members[variable][0]]
        count = len(site.strategies)

        def rank(option: int) -> tuple[int, int]:
            return option // count, _splits(site, site.strategies[option % count])

        return int(max(options, key=rank))

    return decided_plan(planning, cluster, pick, recompute=True)


def _splits(_: Site, strategy: Strategy) -> int:
    """How many dims of operands and results axes split."""
    specs = (*strategy.inputs, *strategy.outputs)
    return sum(len(spec.axes_of(dim)) for spec in specs for dim in range(len(spec.dims)))


def _uneven_splits(mesh: Mesh, site: Site, strategy: Strategy) -> int:
    """How many operands and results hold padding under a strategy."""
    operands = [] if site.node is None else [operand.meta["val"].shape for operand in operands_of(site.node)]
    shapes = [*operands, *(result.shape for result in site.results)]
    specs = (*strategy.inputs, *strategy.outputs) if site.node is not None else ()
    return sum(not spec.is_even(shape, mesh) for shape, spec in zip(shapes, specs, strict=True))


def _laptop(mesh: Mesh) -> Cluster:
    """What plans are drawn for: with a host link, so that they offload too."""
    node = node_type("cpu_laptop")
    linked = dataclasses.replace(node.device, host_link=HostLink(1e10, 1e10))
    return Cluster(node.with_device(linked), nodes=1, devices_per_node=mesh.size)


def _unfolded_problem(program: Program, mesh: Mesh, cluster: Cluster) -> PlanningProblem:
    """The planning problem with a variable of its own for every site, alike or not."""
    space = EnumerateStrategies(mesh)(prepare(program))
    alone = {name: name for name in space.sites}
    return build_problem(space, Prices(cluster, mesh), find_lifetimes(space, 0.0), alone)


@dataclass(frozen=True, slots=True)
class _Deciding:
    """What there is to decide: with recomputation and offload, or without."""

    options: RecomputeOptions
    problem: RecomputeProblem


def _deciding(planning: PlanningProblem, cluster: Cluster, recompute: bool) -> _Deciding:
    has_host = cluster.device.host_link is not None
    every = find_options(planning.space, planning.classes, least_share=0.0, offload=has_host)
    options = every if recompute else dataclasses.replace(every, keepings={})
    return _Deciding(options, build_recompute_problem(planning, options, with_memory=False))


def _draw_plan(
    draw: Draw, planning: PlanningProblem, deciding: Callable[[bool], _Deciding], cluster: Cluster, is_added_up: bool
) -> Plan:
    gradients = _read_by_update(planning) if is_added_up else ()

    def pick(variable: int, options: np.ndarray) -> int:
        site = planning.space.sites[planning.members[variable][0]]
        if site.name in gradients:
            options = options[[_is_sum(site.strategies[option % len(site.strategies)]) for option in options]]
        return int(options[draw(st.integers(0, len(options) - 1))])

    return _decided(planning, deciding(draw(st.booleans())), cluster, pick)


def _read_by_update(planning: PlanningProblem) -> Collection[str]:
    """The sites whose results an update reads, which are added up over micro-batches."""
    sites, links = planning.space.sites, planning.space.links
    return {link.tail for link in links if sites[link.head].phase == UPDATE and sites[link.tail].phase != UPDATE}


def _is_sum(strategy: Strategy) -> bool:
    """Whether what is yielded is whole or awaits sums."""
    return all(reduction is Reduction.SUM for spec in strategy.outputs for _, reduction in spec.partial)


def decided_plan(
    planning: PlanningProblem, cluster: Cluster, pick: Callable[[int, np.ndarray], int], *, recompute: bool = False
) -> Plan:
    """The plan of a choice that is made in program order, each variable's among what its neighbours so far leave.

    Args:
        planning: a problem without recomputation.
        cluster: what its ranks are priced as; values are offloaded only where it has a host link.
        pick: from a variable and what it may be, one of these. With recomputation the strategies of a variable come
            once for each keeping, those that keep its values first.
        recompute: whether values may be recomputed or offloaded.
    """
    return _decided(planning, _deciding(planning, cluster, recompute), cluster, pick)


def _decided(
    planning: PlanningProblem, deciding: _Deciding, cluster: Cluster, pick: Callable[[int, np.ndarray], int]
) -> Plan:
    options, problem = deciding.options, deciding.problem
    choice: dict[int, int] = {}
    for variable in range(len(problem.assignment.costs)):
        choice[variable] = pick(variable, np.flatnonzero(_allowed(problem.assignment, variable, choice)))
    decided = tuple(choice[variable] for variable in range(len(choice)))
    again, strategies = problem.again(decided), problem.without_keepings(decided)
    running = with_again(planning, again)
    cost = running.assignment.cost_of(strategies)
    plan = plan_of_choice(running, strategies, cost, None, cluster, PlanOptions())
    return dataclasses.replace(
        plan,
        recompute=Recompute(again.recomputed, options.candidates(RECOMPUTED)),
        offload=Offload(again.offloaded, options.candidates(OFFLOADED), int(host_bytes(running, strategies))),
    )


def _allowed(assignment: Assignment, variable: int, choice: Mapping[int, int]) -> np.ndarray:
    """The options of a variable that cost a finite time beside what is decided."""
    cost = assignment.costs[variable]
    for edge in assignment.edges:
        if edge.head == variable and edge.tail in choice:
            cost = cost + edge.cost[choice[edge.tail], :]
        elif edge.tail == variable and edge.head in choice:
            cost = cost + edge.cost[:, choice[edge.head]]
    return np.isfinite(cost)
