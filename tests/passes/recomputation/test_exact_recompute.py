"""The search of small problems: equal to trying every plan, with recomputation and offload, to the byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autoshard.errors import DoesNotFitError
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import Program
from autoshard.testing.programs import DrawnProgram, programs
from autoshard.tracing import trace
from passes.planning.build_assignment import PlanningProblem
from passes.planning.exact_memory import exact_memory, exact_peak
from passes.planning.search import Search
from passes.planning.search_exactly import is_searched_exactly
from passes.recomputation.exact_recompute import ExactRecompute
from passes.recomputation.fitting import JointSolution
from passes.recomputation.recompute_options import find_options
from passes.recomputation.recompute_problem import Again, RecomputeProblem, build_recompute_problem
from passes.recomputation.recompute_search import solve_jointly
from passes.recomputation.with_again import with_again
from passes.solver.assignment import Assignment
from tests.passes.blocks import blocks_program, perceptron_program, problem_of, problem_of_drawn
from tests.passes.recomputation.cheap_choices import cheaper_than
from tests.passes.recomputation.test_recompute_problem import chains, drawn_choice, joint, sines

LINE, SQUARE, THREE = Mesh({"x": 2}), Mesh({"x": 2, "y": 2}), Mesh({"x": 3})


def changed(problem: Assignment, choice: Sequence[int], generator: np.random.Generator) -> tuple[int, ...]:
    """A choice of finite cost that differs in few variables."""
    while True:
        found = list(choice)
        for variable in generator.integers(0, len(choice), int(generator.integers(1, 6))):
            found[variable] = int(generator.integers(len(problem.costs[variable])))
        if np.isfinite(problem.cost_of(found)):
            return tuple(found)


def check_rows(problem: RecomputeProblem, generator: np.random.Generator, points: int) -> None:
    """A row is exact for its choice, and no other takes less than it says: neither a drawn one nor one beside it."""
    exact, edges = ExactRecompute(problem), problem.assignment.edges
    choices = [drawn_choice(problem, int(seed)) for seed in generator.integers(0, 1000, 3)]
    for choice in choices:
        counted = exact.counted(choice)
        used = counted.used()
        for point in {*generator.integers(0, len(used), points).tolist(), int(used.argmax())}:
            row = counted.row(point)
            assert row.bytes_of(choice, edges) == pytest.approx(used[point], abs=0.5)
            for other in (*choices, *(changed(problem.assignment, choice, generator) for _ in range(3))):
                assert row.bytes_of(other, edges) <= exact.counted(other).used().max() + 0.5


@pytest.mark.parametrize("mesh", [LINE, SQUARE])
def test_a_row_is_exact_for_its_choice_and_true_of_all(mesh: Mesh) -> None:
    """Whatever is resharded, recomputed and offloaded."""
    check_rows(joint(problem_of(perceptron_program(64), mesh)), np.random.default_rng(0), points=6)


@pytest.mark.slow
@settings(max_examples=40)
@given(st.data())
def test_rows_of_drawn_programs(data: st.DataObject) -> None:
    """Uneven dims and rewritten calls too."""
    drawn = data.draw(programs(max_blocks=1, uneven=data.draw(st.booleans())))
    planning = problem_of(trace(drawn.model, drawn.inputs), data.draw(st.sampled_from([LINE, SQUARE, THREE])))
    check_rows(joint(planning), np.random.default_rng(data.draw(st.integers(0, 99))), points=4)


@pytest.mark.slow
def test_rows_with_optimizer_state() -> None:
    """Of programs of several blocks."""
    planning = problem_of(blocks_program(), LINE, state_bytes_per_parameter_byte=2.0)
    check_rows(joint(planning), np.random.default_rng(0), points=6)


def test_the_count_is_that_of_the_program_that_runs() -> None:
    """At every point."""
    problem = joint(problem_of(perceptron_program(64), LINE))
    for seed in range(3):
        choice = drawn_choice(problem, seed)
        running = with_again(problem.planning, problem.again(choice))
        used = exact_memory(running, problem.without_keepings(choice)).used()
        assert np.array_equal(ExactRecompute(problem).counted(choice).used(), used)


def searched(planning: PlanningProblem) -> RecomputeProblem:
    """The problem of the search."""
    return build_recompute_problem(planning, find_options(planning.space, planning.classes, offload=True))


MOST_CHOICES = 20_000
"""Of which an example is made at most: most stand for the same plans."""


@dataclass
class Oracle:
    """Every plan of a problem that costs less than some bound, priced and counted in the program that runs then."""

    problem: RecomputeProblem
    running: dict[Again, PlanningProblem] = field(default_factory=dict)

    def plans(self, cost: float) -> set[tuple[tuple[int, ...], Again]]:
        """Strategies, and what is recomputed and offloaded."""
        choices = list(islice(cheaper_than(self.problem.assignment, cost), MOST_CHOICES + 1))
        assume(len(choices) <= MOST_CHOICES)
        return {(self.problem.without_keepings(choice), self.problem.again(choice)) for choice in choices}

    def counted(self, strategies: tuple[int, ...], again: Again) -> tuple[float, float]:
        """Seconds and bytes."""
        if again not in self.running:
            self.running[again] = with_again(self.problem.planning, again)
        running = self.running[again]
        return running.assignment.cost_of(strategies), exact_peak(running, strategies)


def found_within(planning: PlanningProblem, limit: float) -> JointSolution:
    """The search, with time to end on a busy machine."""
    return solve_jointly(planning, Search(limit, time_budget_s=600.0), {}, ())


def check_optimal(planning: PlanningProblem, limit: float) -> None:
    """What is found fits, and nothing cheaper does; what cannot fit is said, with the least memory that would do."""
    oracle = Oracle(searched(planning))
    try:
        found = found_within(planning, limit)
    except DoesNotFitError as error:
        smallest, is_proven = error.smallest_bytes, error.is_proven
        assert is_proven
        assert limit < smallest == found_within(planning, smallest).peak_bytes()
        return
    cost, peak = oracle.counted(found.solution.choice, found.again)
    assert found.peak_bytes() == peak <= limit
    assert found.solution.cost == pytest.approx(cost, rel=1e-12)
    assert found.solution.lower_bound == pytest.approx(cost, rel=1e-8)
    for plan in oracle.plans(cost * (1 - 1e-9)):
        assert oracle.counted(*plan)[1] > limit


@settings(max_examples=2)
@given(chains(), st.sampled_from([0.3, 0.8, 0.99]))
def test_the_search_equals_trying_every_plan(program: Program, share: float) -> None:
    """With a memory limit, recomputation and offload, each plan counted exactly in the program that runs."""
    planning = problem_of(program, LINE)
    check_optimal(planning, float(int(share * exact_peak(planning, Search()(planning).choice))))


@pytest.mark.slow
@settings(max_examples=60)
@given(st.one_of(chains(), st.just(sines(1))), st.integers(0, 999), st.booleans())
def test_at_the_memory_of_any_plan_and_a_byte_below(program: Program, seed: int, fits: bool) -> None:
    """Where the least difference in the count is one in the plan."""
    planning = problem_of(program, LINE)
    problem = searched(planning)
    exact, free = ExactRecompute(problem), Search()(planning)
    near = changed(problem.assignment, free.choice, np.random.default_rng(seed))
    check_optimal(planning, float(exact.counted(near).used().max()) - (not fits))


def test_a_plan_that_the_tables_count_too_large_is_found() -> None:
    """Where copies that depend on three variables were counted twice, it was refused, and a slower one taken."""
    planning = problem_of(sines(2), LINE)
    limit = float(int(0.8 * exact_peak(planning, Search()(planning).choice)))
    found, tabled = found_within(planning, limit), Search(limit)(searched(planning))
    assert found.peak_bytes() <= limit
    assert found.solution.cost < 0.995 * tabled.cost


def test_a_search_that_runs_out_of_time_falls_back_on_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it finds then fits all the same, and is no cheaper."""
    planning = problem_of(sines(1), LINE)
    limit = float(int(0.8 * exact_peak(planning, Search()(planning).choice)))
    best = solve_jointly(planning, Search(limit), {}, ()).solution.cost
    monkeypatch.setattr("passes.recomputation.recompute_search.cheapest_that_fits", out_of_time)
    for recompute in (False, True):
        found = solve_jointly(planning, Search(limit), {}, (), recompute=recompute)
        assert found.peak_bytes() <= limit
        assert found.solution.cost >= best * (1 - 1e-9)


def out_of_time(*_: object) -> None:
    raise TimeoutError


@pytest.mark.slow
@settings(max_examples=60)
@given(st.data(), programs(max_blocks=1, whole_steps=None), st.sampled_from([LINE, THREE]))
def test_the_search_of_drawn_programs_equals_trying_every_plan(
    data: st.DataObject, drawn: DrawnProgram, mesh: Mesh
) -> None:
    """In the memory of any plan that costs less than twice the cheapest one, and a byte below."""
    planning = problem_of_drawn(drawn, mesh)
    oracle = Oracle(searched(planning))
    assume(is_searched_exactly(oracle.problem.assignment))
    choices = islice(cheaper_than(oracle.problem.assignment, 2 * Search()(planning).cost), MOST_CHOICES)
    plans = [(oracle.problem.without_keepings(choice), oracle.problem.again(choice)) for choice in choices]
    assume(plans)
    some = data.draw(st.lists(st.sampled_from(plans), min_size=1, max_size=20))
    peaks = sorted({oracle.counted(*plan)[1] for plan in some})
    check_optimal(planning, data.draw(st.sampled_from(peaks)) - data.draw(st.integers(0, 1)))
