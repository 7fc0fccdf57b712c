"""The recomputation problem counts cost and memory of programs with clones, and searches find its optimum."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from autoshard.errors import DoesNotFitError
from autoshard.ir.mesh import Mesh
from autoshard.ir.offload import OffloadedNode
from autoshard.ir.program import Program
from autoshard.ir.recompute import RecomputedNode
from autoshard.tracing import trace
from cost_models.device import HostLink
from cost_models.hardware import Cluster
from passes.driver.plan_and_lower import planning_problem
from passes.driver.plan_options import PlanOptions
from passes.planning.build_assignment import PlanningProblem
from passes.planning.search import Search
from passes.recomputation.recompute_options import OFFLOADED, RECOMPUTED, ValuePolicy, find_options
from passes.recomputation.recompute_problem import NOTHING_RESTORED, RecomputeProblem, Restored, build_recompute_problem
from passes.recomputation.recompute_search import solve_jointly
from passes.recomputation.with_restored import with_restored
from tests.passes.blocks import blocks_program, h100s, peak_of, perceptron_program, problem_of

LINE = Mesh({"x": 2})


class Pointwise(nn.Module):
    """A weighted input under a chain of functions, whose derivatives need operands or results."""

    def __init__(self, rows: int, functions: Sequence[str]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, 64))
        self.functions = functions

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.weight
        for name in self.functions:
            y = getattr(torch, name)(y)
        return y.sum()


class Scaled(nn.Module):
    """A weighted input times a constant that is no buffer, under a sine and an exponential."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, 64))
        self.scale = torch.rand(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight * self.scale).sin().exp().sum()


@st.composite
def chains(draw: st.DrawFn) -> Program:
    """Draw a traced program with few values to recompute."""
    functions = draw(st.sampled_from([("exp", "sin"), ("relu", "exp"), ("exp", "relu")]))
    with torch.device("meta"):
        rows = draw(st.sampled_from([64, 4096]))
        return trace(Pointwise(rows, functions), (torch.zeros(rows, 64),), {})


def joint(planning: PlanningProblem) -> RecomputeProblem:
    options = find_options(planning, least_share=0.0, offload=True)
    return build_recompute_problem(planning, options)


def offloading(planning: PlanningProblem) -> RecomputeProblem:
    """The problem in which values may be offloaded, but not recomputed."""
    options = find_options(planning, least_share=0.0, offload=True)
    policies = {
        number: tuple(policy for policy in found if policy is ValuePolicy.AS_READ or policy in OFFLOADED)
        for number, found in options.policies.items()
    }
    return build_recompute_problem(planning, dataclasses.replace(options, policies=policies))


@cache
def example(name: str) -> RecomputeProblem:
    program = {"blocks": blocks_program, "perceptron": perceptron_program}[name]()
    return joint(problem_of(program, LINE))


def drawn_choice(problem: RecomputeProblem, seed: int) -> tuple[int, ...]:
    """Draw a choice of finite cost: in turn, each variable takes the allowed option with the least random number."""
    generator = np.random.default_rng(seed)
    assignment = problem.assignment
    choice: list[int] = []
    for variable, cost in enumerate(assignment.costs):
        total = generator.random(len(cost)) + np.where(np.isfinite(cost), 0.0, np.inf)
        for edge in assignment.edges:
            if edge.head == variable and edge.tail < variable:
                total = total + np.where(np.isfinite(edge.cost[choice[edge.tail], :]), 0.0, np.inf)
            elif edge.tail == variable and edge.head < variable:
                total = total + np.where(np.isfinite(edge.cost[:, choice[edge.head]]), 0.0, np.inf)
        choice.append(int(np.argmin(total)))
    assert np.isfinite(assignment.cost_of(choice))
    return tuple(choice)


@pytest.mark.parametrize("name", ["blocks", "perceptron"])
def test_cost_and_memory_are_those_of_the_program_with_clones(name: str) -> None:
    """A program with clones and copies has at most the counted cost and memory, and often exactly the counted cost."""
    problem = example(name)
    recomputed, offloaded, same = 0, 0, 0
    for seed in range(24):
        choice = drawn_choice(problem, seed)
        restored, strategies = problem.restored(choice), problem.without_policies(choice)
        running = with_restored(problem.planning, restored)
        cost = running.assignment.cost_of(strategies)
        assert cost <= problem.assignment.cost_of(choice) * (1 + 1e-12)
        assert running.usage(strategies).max() <= problem.usage(choice).max()
        recomputed += bool(restored.recomputed)
        offloaded += bool(restored.offloaded)
        same += cost == pytest.approx(problem.assignment.cost_of(choice), rel=1e-12)
    assert min(recomputed, offloaded) >= 12
    assert same >= 2


def test_a_value_computed_from_a_constant_may_be_recomputed() -> None:
    """A value computed from a constant may be recomputed, and the program takes at most the counted memory."""
    problem = joint(problem_of(trace(Scaled(), (torch.zeros(64, 64),)), LINE))
    recomputed: set[str] = set()
    for choice in (drawn_choice(problem, seed) for seed in range(24)):
        restored, strategies = problem.restored(choice), problem.without_policies(choice)
        recomputed |= {node.name for node in restored.recomputed}
        running = with_restored(problem.planning, restored)
        assert running.usage(strategies).max() <= problem.usage(choice).max()
    sites = problem.space.sites
    assert recomputed & {link.head for link in problem.space.links if sites[link.tail].is_constant}


def test_the_optimum_is_what_its_program_costs_and_takes() -> None:
    """At 75 % of the fastest plan's memory, the optimum's program has the counted cost and memory."""
    problem = example("blocks")
    free = Search()(problem.planning)
    found = Search(0.75 * float(problem.planning.usage(free.choice).max()))(problem)
    restored, strategies = problem.restored(found.choice), problem.without_policies(found.choice)
    running = with_restored(problem.planning, restored)
    assert len(restored.recomputed) >= 4
    assert running.assignment.cost_of(strategies) == pytest.approx(found.cost, rel=1e-12)
    assert running.usage(strategies).max() == problem.usage(found.choice).max()


def test_nothing_recomputed_costs_what_it_did() -> None:
    """A choice that keeps every value has the plain program's cost, and counts at least its memory."""
    problem = example("blocks")
    planning = problem.planning
    for seed in range(20):
        generator = np.random.default_rng(seed)
        choice = tuple(int(generator.integers(len(cost))) for cost in planning.assignment.costs)
        assert problem.without_policies(choice) == choice
        assert problem.assignment.cost_of(choice) == planning.assignment.cost_of(choice)
        assert problem.usage(choice).max() >= planning.usage(choice).max()
        assert problem.restored(choice) == NOTHING_RESTORED


def test_memory_rows_are_the_usage() -> None:
    """For any choice, the memory row of each point has the bytes that `usage` counts at the point."""
    problem = example("perceptron")
    for seed in range(5):
        choice = drawn_choice(problem, seed)
        used = problem.usage(choice)
        rows = [problem.memory_row(point).bytes_of(choice, problem.assignment.edges) for point in range(len(used))]
        assert rows == pytest.approx(list(used))


def with_every_recomputation(problem: RecomputeProblem) -> Iterator[PlanningProblem]:
    """Yield the planning problem with each possible set of recomputed and offloaded values, at each place."""
    numbers = sorted(problem.options.policies)
    sizes = [len(cost) for cost in problem.planning.assignment.costs]
    seen = set()
    for policies in product(*(range(len(problem.options.policies[number])) for number in numbers)):
        choice = [0] * len(sizes)
        for number, policy in zip(numbers, policies, strict=True):
            choice[number] = policy * sizes[number]
        pairs = (edge.cost[choice[edge.tail], choice[edge.head]] for edge in problem.assignment.edges)
        if all(map(np.isfinite, pairs)):
            seen.add(frozenset(_all_again(problem, choice)))
    for nodes in sorted(seen, key=len):
        recomputed = tuple(node for node in nodes if isinstance(node, RecomputedNode))
        offloaded = tuple(node for node in nodes if isinstance(node, OffloadedNode))
        yield with_restored(problem.planning, Restored(recomputed, offloaded))


def _all_again(problem: RecomputeProblem, choice: Sequence[int]) -> Iterator[RecomputedNode | OffloadedNode]:
    """Yield all recomputed and offloaded values, also values without memory under these strategies."""
    for name, before in problem.options.anchors.items():
        variable = problem.planning.classes[name]
        number = choice[variable] // len(problem.planning.assignment.costs[variable])
        policy = problem.options.policies.get(variable, (ValuePolicy.AS_READ,))[number]
        if policy in RECOMPUTED:
            yield RecomputedNode(name, before[policy], "")
        if policy in OFFLOADED:
            yield OffloadedNode(name, before[policy], "")


def assert_optimal(problem: RecomputeProblem, limit: float) -> Restored | None:
    """Check that the search finds the least cost over all sets of recomputed and offloaded values.

    Each set has its own exact search and memory. The result is the optimum's restored values, or None if nothing fits.
    """
    search = Search(limit)
    alone = Search(limit, says_smallest=False)  # what a program that does not fit would take is not asked
    costs = []
    for running in with_every_recomputation(problem):
        try:
            costs.append(alone(running).cost)
        except DoesNotFitError:
            continue
    if not costs:
        with pytest.raises(DoesNotFitError):
            search(problem)
        return None
    found = search(problem)
    assert found.cost == pytest.approx(min(costs), rel=1e-9)
    return problem.restored(found.choice)


@pytest.mark.slow
@settings(max_examples=2)
@given(chains(), st.sampled_from([0.6, 0.7, 0.8]))
def test_the_search_equals_trying_every_recomputation(program: Program, share: float) -> None:
    """The exact search, and the planner's search, find the least cost over all sets of recomputed values."""
    planning = problem_of(program, LINE)
    problem = build_recompute_problem(planning, find_options(planning, least_share=0.0))
    limit = share * float(planning.usage(Search()(planning).choice).max())
    restored = assert_optimal(problem, limit)
    if restored is not None:
        found = solve_jointly(planning, Search(limit), {}, (), peak_of, offload=False)
        assert found.solution.cost == pytest.approx(Search(limit)(problem).cost, rel=1e-9)


class Sines(nn.Module):
    """A scaled input under a chain of sines, whose derivatives keep their operands."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64))
        self.count = count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.weight
        for _ in range(self.count):
            y = y.sin()
        return y.sum()


def sines(count: int) -> Program:
    with torch.device("meta"):
        return trace(Sines(count), (torch.zeros(4096, 64),), {})


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("count", "ranks", "share", "offloaded"), [(4, 1, 0.7, 2), (4, 1, 0.9, 1), (3, 1, 0.7, 0), (3, 2, 0.5, 1)]
)
def test_the_search_equals_trying_every_offload(count: int, ranks: int, share: float, offloaded: int) -> None:
    """The search finds the least cost over all sets of offloaded values, and offloads the expected number of values."""
    planning = problem_of(sines(count), Mesh({"x": ranks}))
    limit = share * float(planning.usage(Search()(planning).choice).max())
    restored = assert_optimal(offloading(planning), limit)
    assert (0 if restored is None else len(restored.offloaded)) == offloaded


def slow_cluster(link: HostLink | None) -> Cluster:
    """Two devices with slow kernels; `link` is their link to host memory, or None."""
    node = h100s(LINE).node
    slow = {"memory_bandwidth_bytes_per_s": 1e10, "launch_latency_s": 0.0}
    return Cluster(node.with_device(dataclasses.replace(node.device, host_link=link, **slow)), 1, LINE.size)


NEAR = HostLink(1e12, 1e12)


@pytest.mark.slow
def test_the_search_equals_trying_recomputation_and_offload() -> None:
    """The search finds the least cost over all sets of recomputed and offloaded values."""
    planning = planning_problem(sines(2), LINE, slow_cluster(NEAR), PlanOptions())
    assert_optimal(joint(planning), float(planning.usage(Search()(planning).choice).max()) - 1)


@pytest.mark.parametrize("link", [NEAR, None])
def test_only_a_device_with_a_host_link_offloads(link: HostLink | None) -> None:
    """In too little memory, devices with a fast host link offload, and devices without a host link recompute."""
    planning = planning_problem(sines(4), Mesh({"x": 1}), slow_cluster(link), PlanOptions())
    limit = 0.9 * float(planning.usage(Search()(planning).choice).max())
    restored = solve_jointly(planning, Search(limit), {}, (), peak_of).restored
    assert bool(restored.offloaded) == (link is not None)
    assert bool(restored.recomputed) == (link is None)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_the_host_holds_no_more_than_it_has(share: float) -> None:
    """Offloaded values fit the host's memory, also in a plan at the device memory that an error names."""
    one, cluster = Mesh({"x": 1}), slow_cluster(NEAR)
    planning = planning_problem(sines(4), one, cluster, PlanOptions())
    limit = 0.9 * float(planning.usage(Search()(planning).choice).max())
    room = int(share * solve_jointly(planning, Search(limit), {}, (), peak_of).host_bytes)
    node = dataclasses.replace(cluster.node, host_memory_bytes=room * cluster.devices_per_node)
    narrow = planning_problem(sines(4), one, Cluster(node, 1, cluster.devices_per_node), PlanOptions())
    found = solve_jointly(narrow, Search(limit), {}, (), peak_of)
    assert found.host_bytes <= room
    assert bool(found.restored.offloaded) == (share == 1.0)
    with pytest.raises(DoesNotFitError) as caught:
        solve_jointly(narrow, Search(1.0), {}, (), peak_of)
    found = solve_jointly(narrow, Search(caught.value.smallest_bytes), {}, (), peak_of)
    assert found.host_bytes <= room
    assert found.peak_bytes(peak_of) <= caught.value.smallest_bytes


def test_stages_of_a_sweep_of_limits() -> None:
    """Plans offload and recompute in little memory, only recompute in more, then do neither; costs never rise."""
    planning = planning_problem(sines(4), LINE, h100s(LINE), PlanOptions())
    largest = float(planning.usage(Search()(planning).choice).max())
    with pytest.raises(DoesNotFitError):
        solve_jointly(planning, Search(0.3 * largest), {}, (), peak_of)
    found = [solve_jointly(planning, Search(share * largest), {}, (), peak_of) for share in (0.34, 0.45, 0.6, 1.0)]
    stages = [(bool(item.restored.recomputed), bool(item.restored.offloaded)) for item in found]
    assert stages == [(True, True), (True, False), (False, False), (False, False)]
    costs = [item.solution.cost for item in found]
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] < costs[-2]


def test_policies() -> None:
    """A value that the backward reads may be recomputed; a value that only feeds recomputed values may be kept.

    The first value that a block's backward reads has one way to be recomputed, because early and late are equal.
    """
    problem = example("blocks")
    policies = {problem.planning.members[number][0]: found for number, found in problem.options.policies.items()}
    assert policies["fan_out_10"] == (ValuePolicy.AS_READ, *RECOMPUTED, *OFFLOADED)
    assert policies["mm"] == (ValuePolicy.AS_READ, ValuePolicy.KEPT, ValuePolicy.EARLY, ValuePolicy.LATE)
    assert policies["gelu"] == (ValuePolicy.AS_READ, ValuePolicy.KEPT, ValuePolicy.EARLY)
    assert not set(policies) & {slot.node for slot in problem.space.program.inputs}


class HandsOut(nn.Module):
    """A model that also returns a value that its backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, 64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = (x @ self.weight).exp()
        return (hidden * x.cos()).sin().sum(), hidden


def test_what_leaves_the_program_is_not_recomputed() -> None:
    """A result of the program is not recomputed, but a value computed from the result may be."""
    with torch.device("meta"):
        program = trace(HandsOut(), (torch.zeros(64, 64),), {})
    problem = joint(problem_of(program, LINE))
    leaving = {link.tail for link in problem.space.links if link.head.startswith("output:")}
    targets = {str(node.target) for node in program.graph.nodes if node.name in problem.options.anchors}
    assert "aten.mul.Tensor" in targets
    assert not leaving & set(problem.options.anchors)


def test_small_values_are_left_alone() -> None:
    """With `least_share`, fewer values are recomputed, and none with a share of the whole memory."""
    planning = example("blocks").planning
    assert not find_options(planning, least_share=1.0).policies
    few = find_options(planning, least_share=0.2).policies
    every = find_options(planning, least_share=0.0).policies
    assert 0 < len(few) < len(every)


class TwoSizes(nn.Module):
    """A model whose backward reads an exponential of 64 numbers and an exponential of many rows."""

    def __init__(self) -> None:
        super().__init__()
        self.few, self.many = nn.Parameter(torch.zeros(64)), nn.Parameter(torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.few.exp().sin().sum() + (x * self.many).exp().sin().sum()


@pytest.mark.parametrize(("rows", "is_small"), [(128, False), (4096, True)])
def test_unless_asked_values_below_a_thousandth_are_left_alone(rows: int, is_small: bool) -> None:
    """By default, values below a thousandth of the memory are kept.

    Here these are 64 numbers beside 4,096 rows, but not beside 128 rows.
    """
    with torch.device("meta"):
        planning = problem_of(trace(TwoSizes(), (torch.zeros(rows, 64),), {}), LINE)
    found = find_options(planning).anchors
    nodes = [site.node for name, site in planning.space.sites.items() if name in found]
    restored = {tuple(node.meta["val"].shape) for node in nodes if node is not None and "exp" in str(node.target)}
    assert restored == ({(rows, 64)} if is_small else {(64,), (rows, 64)})
