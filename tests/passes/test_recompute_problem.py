"""The problem with recomputation: true to the program that it stands for, and solved to the optimum."""

from __future__ import annotations

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
from autoshard.ir.program import Program
from autoshard.ir.recompute import RecomputedNode
from autoshard.tracing import trace
from passes.build_assignment import PlanningProblem
from passes.recompute_options import RECOMPUTED, Keeping, find_options
from passes.recompute_problem import RecomputeProblem, build_recompute_problem
from passes.recompute_search import solve_jointly, with_recompute
from passes.search import Search
from tests.passes.blocks import blocks_program, perceptron_program, problem_of

LINE = Mesh({"x": 2})


class Pointwise(nn.Module):
    """A weight under a chain of functions, some of whose derivatives need their operand and some their result."""

    def __init__(self, rows: int, functions: Sequence[str]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, 64))
        self.functions = functions

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.weight
        for name in self.functions:
            y = getattr(torch, name)(y)
        return y.sum()


@st.composite
def chains(draw: st.DrawFn) -> Program:
    """Programs with few values to recompute."""
    functions = draw(st.sampled_from([("exp", "sin"), ("relu", "exp"), ("exp", "relu")]))
    with torch.device("meta"):
        rows = draw(st.sampled_from([64, 4096]))
        return trace(Pointwise(rows, functions), (torch.zeros(rows, 64),), {})


def joint(planning: PlanningProblem) -> RecomputeProblem:
    return build_recompute_problem(planning, find_options(planning.space, planning.classes, least_share=0.0))


@cache
def example(name: str) -> RecomputeProblem:
    program = {"blocks": blocks_program, "perceptron": perceptron_program}[name]()
    return joint(problem_of(program, LINE))


def drawn_choice(problem: RecomputeProblem, seed: int) -> tuple[int, ...]:
    """A choice of finite cost: the cheapest one for random costs of options."""
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
    """Under random choices the cost is no less, and so is the memory; what it says to recompute is often done."""
    problem = example(name)
    recomputed, same = 0, 0
    for seed in range(40):
        choice = drawn_choice(problem, seed)
        nodes, strategies = problem.recomputed(choice), problem.without_keepings(choice)
        running = with_recompute(problem.planning, nodes)
        cost = running.assignment.cost_of(strategies)
        assert cost <= problem.assignment.cost_of(choice) * (1 + 1e-12)
        assert running.usage(strategies).max() <= problem.usage(choice).max()
        recomputed += bool(nodes)
        same += cost == pytest.approx(problem.assignment.cost_of(choice), rel=1e-12)
    assert recomputed >= 20
    assert same >= 5


def test_the_optimum_is_what_its_program_costs_and_takes() -> None:
    """To the last digit, at a limit under which much is recomputed."""
    problem = example("blocks")
    free = Search()(problem.planning)
    found = Search(0.7 * float(problem.planning.usage(free.choice).max()))(problem)
    nodes, strategies = problem.recomputed(found.choice), problem.without_keepings(found.choice)
    running = with_recompute(problem.planning, nodes)
    assert len(nodes) >= 4
    assert running.assignment.cost_of(strategies) == pytest.approx(found.cost, rel=1e-12)
    assert running.usage(strategies).max() == problem.usage(found.choice).max()


def test_nothing_recomputed_costs_what_it_did() -> None:
    """Where every value is kept as it is read, the cost is that without recomputation, and the memory no less."""
    problem = example("blocks")
    planning = problem.planning
    for seed in range(20):
        generator = np.random.default_rng(seed)
        choice = tuple(int(generator.integers(len(cost))) for cost in planning.assignment.costs)
        assert problem.without_keepings(choice) == choice
        assert problem.assignment.cost_of(choice) == planning.assignment.cost_of(choice)
        assert problem.usage(choice).max() >= planning.usage(choice).max()
        assert problem.recomputed(choice) == ()


def test_memory_rows_are_the_usage() -> None:
    """At every point, whatever the choice."""
    problem = example("perceptron")
    for seed in range(5):
        choice = drawn_choice(problem, seed)
        used = problem.usage(choice)
        rows = [problem.memory_row(point).bytes_of(choice, problem.assignment.edges) for point in range(len(used))]
        assert rows == pytest.approx(list(used))


def with_every_recomputation(problem: RecomputeProblem) -> Iterator[PlanningProblem]:
    """The program with every set of values recomputed that is possible, each at every place."""
    numbers = sorted(problem.options.keepings)
    sizes = [len(cost) for cost in problem.planning.assignment.costs]
    seen = set()
    for keepings in product(*(range(len(problem.options.keepings[number])) for number in numbers)):
        choice = [0] * len(sizes)
        for number, keeping in zip(numbers, keepings, strict=True):
            choice[number] = keeping * sizes[number]
        pairs = (edge.cost[choice[edge.tail], choice[edge.head]] for edge in problem.assignment.edges)
        if all(map(np.isfinite, pairs)):
            seen.add(frozenset(_all_recomputed(problem, choice)))
    for nodes in sorted(seen, key=len):
        yield with_recompute(problem.planning, tuple(nodes))


def _all_recomputed(problem: RecomputeProblem, choice: Sequence[int]) -> Iterator[RecomputedNode]:
    """What is recomputed, also where it makes no memory under these strategies: it may under others."""
    for name, before in problem.options.anchors.items():
        variable = problem.planning.classes[name]
        number = choice[variable] // len(problem.planning.assignment.costs[variable])
        keeping = problem.options.keepings.get(variable, (Keeping.AS_READ,))[number]
        if keeping in RECOMPUTED:
            yield RecomputedNode(name, before[keeping], "")


@settings(max_examples=3)
@given(chains(), st.sampled_from([0.6, 0.7, 0.8]))
def test_the_search_equals_trying_every_recomputation(program: Program, share: float) -> None:
    """The least cost over all sets of recomputed values, each program with its own exact search and its own memory."""
    planning = problem_of(program, LINE)
    problem = joint(planning)
    limit = share * float(planning.usage(Search()(planning).choice).max())
    search = Search(limit)
    costs = []
    for running in with_every_recomputation(problem):
        try:
            costs.append(search(running).cost)
        except DoesNotFitError:
            continue
    if not costs:
        with pytest.raises(DoesNotFitError):
            search(problem)
        return
    assert search(problem).cost == pytest.approx(min(costs), rel=1e-9)
    assert solve_jointly(planning, search, {}, ()).solution.cost == pytest.approx(min(costs), rel=1e-9)


def test_keepings() -> None:
    """What the backward reads may be recomputed; what it does not read, but what is made of it, may also be kept.

    What the backward of a block reads first is recomputed there, early and late being the same.
    """
    problem = example("blocks")
    keepings = {problem.planning.members[number][0]: found for number, found in problem.options.keepings.items()}
    assert keepings["hub_10"] == (Keeping.AS_READ, Keeping.EARLY, Keeping.LATE)
    assert keepings["mm"] == (Keeping.AS_READ, Keeping.KEPT, Keeping.EARLY, Keeping.LATE)
    assert keepings["gelu"] == (Keeping.AS_READ, Keeping.KEPT, Keeping.EARLY)
    assert not set(keepings) & {slot.node for slot in problem.space.program.inputs}


class HandsOut(nn.Module):
    """A model that also returns what its backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, 64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = (x @ self.weight).exp()
        return (hidden * x.cos()).sin().sum(), hidden


def test_what_leaves_the_program_is_not_recomputed() -> None:
    """An output stays; what is made of it may be recomputed."""
    with torch.device("meta"):
        program = trace(HandsOut(), (torch.zeros(64, 64),), {})
    problem = joint(problem_of(program, LINE))
    leaving = {link.tail for link in problem.space.links if link.head.startswith("output:")}
    targets = {str(node.target) for node in program.graph.nodes if node.name in problem.options.anchors}
    assert "aten.mul.Tensor" in targets
    assert not leaving & set(problem.options.anchors)


def test_small_values_are_left_alone() -> None:
    """With a least share, only what is that large is recomputed for its own sake."""
    planning = example("blocks").planning
    assert not find_options(planning.space, planning.classes, least_share=1.0).keepings
    few = find_options(planning.space, planning.classes, least_share=0.2).keepings
    every = find_options(planning.space, planning.classes, least_share=0.0).keepings
    assert 0 < len(few) < len(every)
