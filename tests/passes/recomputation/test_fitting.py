"""The memory of the lowered program, and not the search's count, decides whether a plan fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.errors import DoesNotFitError
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import Program
from autoshard.testing.programs import DrawnProgram, programs
from autoshard.tracing import trace
from cost_models.hardware import Cluster
from passes.planning.build_assignment import PlanningProblem
from passes.planning.search import Search
from passes.recomputation.fitting import JointSolution, PeakOf, fitting
from passes.recomputation.recompute_search import solve_jointly
from passes.solver.assignment import Solution
from passes.solver.search_control import SearchControl
from tests.passes.blocks import h100s, peak_of, perceptron_program, problem_of, problem_of_drawn, two_nodes
from tests.passes.drawn_choices import drawn_choice
from tests.passes.planning.test_search import Chain, chains

LINE, SQUARE = Mesh({"x": 2}), Mesh({"x": 2, "y": 2})


def found_within(
    planning: PlanningProblem, limit: float, *, recompute: bool, seconds: float = math.inf
) -> JointSolution:
    """The joint solution for a limit in bytes, searched without known recipes to start from."""
    search = Search(limit, control=SearchControl.within(seconds))
    return solve_jointly(planning, search, {}, (), peak_of, recompute=recompute)


def every_choice(planning: PlanningProblem) -> list[tuple[float, tuple[int, ...]]]:
    """All choices with their cost, the cheapest first."""
    choices = product(*(range(len(cost)) for cost in planning.assignment.costs))
    costs = sorted((planning.assignment.cost_of(choice), choice) for choice in choices)
    return [(cost, choice) for cost, choice in costs if cost < float("inf")]


@settings(max_examples=4)
@given(chains(), st.integers(0, 99))
def test_the_search_is_near_the_best_of_every_plan(program: Program, seed: int) -> None:
    """In the memory of a drawn plan, the search finds a fitting plan within 1 % of the best plan's cost."""
    planning = problem_of(program, LINE)
    limit = float(planning.usage(drawn_choice(planning, seed)).max())
    found = found_within(planning, limit, recompute=False)
    best = next(cost for cost, choice in every_choice(planning) if planning.usage(choice).max() <= limit)
    assert found.peak_bytes(peak_of) <= limit
    assert found.solution.lower_bound <= best * (1 + 1e-9)
    assert found.solution.cost <= best * 1.01


@settings(max_examples=3)
@given(chains(), st.sampled_from([h100s, two_nodes]), st.integers(0, 99))
def test_on_two_axes_too(program: Program, cluster: Callable[[Mesh], Cluster], seed: int) -> None:
    """On two axes with equal or unequal links, a search finds a plan that fits, and a lower bound of its cost."""
    planning = problem_of(program, SQUARE, cluster(SQUARE))
    choice = drawn_choice(planning, seed)
    limit = 1.5 * max(float(planning.usage(choice).max()), peak_of(planning, choice))
    found = found_within(planning, limit, recompute=False)
    assert found.peak_bytes(peak_of) <= limit
    assert found.solution.lower_bound <= found.solution.cost


@cache
def trained() -> PlanningProblem:
    return problem_of(perceptron_program(batch=4096), LINE)


def check_the_error(planning: PlanningProblem, *, recompute: bool, seconds: float = 300.0) -> None:
    """Check that a limit of one byte is refused, and that a search in the memory that the error names succeeds."""
    with pytest.raises(DoesNotFitError, match="are enough") as caught:
        found_within(planning, 1.0, recompute=recompute, seconds=seconds)
    smallest = caught.value.smallest_bytes
    assert found_within(planning, smallest, recompute=recompute, seconds=seconds).peak_bytes(peak_of) <= smallest


@settings(max_examples=3)
@given(chains())
def test_the_memory_that_an_error_names_is_enough(program: Program) -> None:
    """For drawn chains, a search in exactly the memory that the error names finds a plan."""
    check_the_error(problem_of(program, LINE), recompute=False)


def test_a_byte_too_few_is_refused_where_there_are_billions() -> None:
    """A limit of billions of bytes is kept to the byte, although the solver cannot resolve a byte.

    A limit of a plan's own peak is enough, and a byte less is refused.
    """
    with torch.device("meta"):
        program = trace(Chain(2**16, 2**16, 0), (torch.zeros(2**16, 2**16),), {}, grad=False)
    planning = problem_of(program, LINE)
    peak = peak_of(planning, found_within(planning, 1e15, recompute=False).solution.choice)
    assert found_within(planning, peak, recompute=False).peak_bytes(peak_of) == peak
    with pytest.raises(DoesNotFitError):
        found_within(planning, peak - 1, recompute=False)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_an_error_about_training_names_what_is_enough(recompute: bool) -> None:
    """For a training program, the memory that an error names is enough, with and without recomputation."""
    check_the_error(trained(), recompute=recompute)


@pytest.mark.parametrize("recompute", [False, True])
def test_without_time_an_error_names_what_is_enough(recompute: bool) -> None:
    """A search without time succeeds in the memory that an error names, with and without recomputation."""
    check_the_error(trained(), recompute=recompute, seconds=0.0)


def test_a_stopped_search_finds_a_plan_within_the_memory_that_an_error_names() -> None:
    """A stopped search fits the memory that an error names, even if tables count half of a plan's memory."""

    def twice(planning: PlanningProblem, choice: Sequence[int]) -> float:
        return 2 * peak_of(planning, choice)

    with pytest.raises(DoesNotFitError) as caught:
        solve_jointly(trained(), Search(1.0), {}, (), twice, recompute=False)
    smallest = caught.value.smallest_bytes
    stopped = Search(smallest, control=SearchControl(is_stopped=True))
    assert solve_jointly(trained(), stopped, {}, (), twice, recompute=False).peak_bytes(twice) <= smallest


@dataclass
class Stairs:
    """A search whose plans take `share` times the limit, and which finds no plan for a limit below `least`."""

    share: float
    least: int
    asked: list[float] = field(default_factory=list)

    def __call__(self, limit: float) -> JointSolution:
        self.asked.append(limit)
        if limit < self.least:
            raise DoesNotFitError("too small", smallest_bytes=self.least)
        return self.plan(limit)

    def frugal(self) -> list[JointSolution]:
        """Return one plan, whose counted memory is `least`."""
        return [self.plan(self.least)]

    def plan(self, limit: float) -> JointSolution:
        return _Counted(Solution((), 1e12 / limit, 1e12 / limit), self.share * limit, limit)  # type: ignore[return-value]


@dataclass(frozen=True)
class _Counted:
    """A search's result that takes `bytes`, although the search counted `counted_bytes`."""

    solution: Solution
    bytes: float
    counted_bytes: float

    def peak_bytes(self, _: PeakOf) -> float:
        return self.bytes


@given(st.floats(0.5, 1.3), st.integers(1_000, 1_000_000), st.floats(0.01, 2.0))
def test_what_fits_is_found_whatever_the_search_counts(share: float, limit: int, least: float) -> None:
    """`fitting` returns a plan within the limit, or the memory of the smallest plan, which is over the limit.

    This holds whether the search counts too much or too little memory.
    """
    search = Stairs(share, int(least * limit))
    found, smallest = fitting(search, search.frugal, limit, SearchControl(), peak_of)
    if found is not None:
        assert smallest is None
        assert found.peak_bytes(peak_of) <= limit
        assert found.solution.lower_bound <= found.solution.cost
        return
    assert smallest is not None
    assert smallest == share * search.least > limit
    assert fitting(search, search.frugal, smallest, SearchControl(), peak_of)[0] is not None


def test_the_first_search_is_the_only_one_where_its_plan_fits() -> None:
    """If the plan of a first search at the limit fits, there is no second search."""
    search = Stairs(0.9, 0)
    assert fitting(search, search.frugal, 1e6, SearchControl(), peak_of)[0] is not None
    assert search.asked == [1e6]


def test_the_next_search_has_as_much_less_as_was_counted_too_little() -> None:
    """If a plan takes 130 bytes more than counted, the next search gets a limit 130 bytes lower."""
    asked = []

    def attempt(limit: float) -> JointSolution:
        """Return a plan counted in hundreds of bytes, 130 bytes too low."""
        asked.append(limit)
        counted = limit // 100 * 100
        return _Counted(Solution((), 1.0, 1.0), counted + 130, counted)  # type: ignore[return-value]

    found, _ = fitting(attempt, list, 1090, SearchControl(), peak_of)
    assert found is not None
    assert found.peak_bytes(peak_of) == 1030
    assert asked == [1090, 960]


def test_where_nothing_is_allowed_nothing_would_do() -> None:
    """If no search finds a plan and there is no frugal plan, `fitting` names no smallest memory."""
    assert fitting(Stairs(1.0, 10), list, 5, SearchControl(), peak_of) == (None, None)


@pytest.mark.slow
@settings(max_examples=25)
@given(programs(max_blocks=1, whole_steps=None), st.sampled_from([LINE, SQUARE]), st.booleans())
def test_the_memory_that_an_error_names_is_enough_for_drawn_programs(
    drawn: DrawnProgram, mesh: Mesh, recompute: bool
) -> None:
    """For drawn programs on one or two axes, the memory that an error names is enough for a plan."""
    check_the_error(problem_of_drawn(drawn, mesh), recompute=recompute, seconds=40.0)
