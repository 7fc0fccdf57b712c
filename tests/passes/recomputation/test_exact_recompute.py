"""The search of small problems: equal to trying every plan, with recomputation and offload, to the byte."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise, product, takewhile

import numpy as np
import pytest
import torch
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from torch import nn

from autoshard.errors import DoesNotFitError
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import Program
from autoshard.ir.spec import PartitionSpec
from autoshard.testing.programs import DrawnProgram, programs
from autoshard.tracing import trace
from passes.planning.build_assignment import PlanningProblem
from passes.planning.constraints import allowed_options, constrainable, own_specs
from passes.planning.exact_memory import exact_memory, exact_peak
from passes.planning.search import Search
from passes.planning.search_exactly import MOST_PAIRS, MOST_PAIRS_TO_PROVE, is_searched_exactly
from passes.recomputation.exact_recompute import ExactRecompute
from passes.recomputation.fitting import JointSolution
from passes.recomputation.recompute_options import find_options
from passes.recomputation.recompute_problem import RecomputeProblem, build_recompute_problem
from passes.recomputation.recompute_search import solve_jointly
from passes.recomputation.with_again import with_again
from passes.solver.assignment import Assignment
from tests.passes.blocks import (
    blocks_program,
    h100s,
    perceptron_program,
    problem_of,
    problem_of_drawn,
    two_nodes,
)
from tests.passes.recomputation.cheap_choices import cheapest_first, largest_table
from tests.passes.recomputation.every_plan import EveryPlan
from tests.passes.recomputation.test_recompute_problem import chains, drawn_choice, joint, sines
from tests.passes.solver.test_solve_milp import assignments

LINE, SQUARE, THREE = Mesh({"x": 2}), Mesh({"x": 2, "y": 2}), Mesh({"x": 3})
PLACES = {
    "line": (LINE, h100s(LINE)),
    "square": (SQUARE, h100s(SQUARE)),
    "square of two nodes": (SQUARE, two_nodes(SQUARE)),
}
"""Meshes, and what they lie on."""


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


MOST_DRAWN = 2_000
"""Of the cheapest choices that many are drawn from."""

MOST_CHOICES = 5_000
"""Choices that cost less than what is found, of which an example has that many at most."""


MOST_ENTRIES = 30_000_000
"""Of a table that the oracle makes."""


def found_within(every: EveryPlan, limit: float) -> JointSolution:
    """The search, with time to end on a busy machine."""
    return solve_jointly(every.problem.planning, Search(limit, time_budget_s=600.0), every.allowed, ())


def check_optimal(every: EveryPlan, limit: float) -> None:
    """What is found fits, and nothing cheaper does; what cannot fit is said, with the least memory that would do."""
    try:
        found = found_within(every, limit)
    except DoesNotFitError as error:
        smallest, is_proven = error.smallest_bytes, error.is_proven
        assert is_proven
        assert limit < smallest == found_within(every, smallest).peak_bytes()
        plans, are_all = every.first(MOST_DRAWN)
        least = min(every.counted(*plan)[1] for plan in plans)
        assert smallest == least if are_all else smallest <= least
        event("nothing fits")
        return
    cost, peak = every.counted(found.solution.choice, found.again)
    assert found.peak_bytes() == peak <= limit
    assert found.solution.cost == pytest.approx(cost, rel=1e-12)
    assert found.solution.lower_bound == pytest.approx(cost, rel=1e-8)
    cheaper, are_all = every.first(MOST_CHOICES, cost * (1 - 1e-9))
    assume(are_all)
    for plan in cheaper:
        assert every.counted(*plan)[1] > limit
    event(f"cheaper plans that do not fit: {'some' if cheaper else 'none'}")


@pytest.mark.parametrize(
    "place", [place if place == "line" else pytest.param(place, marks=pytest.mark.slow) for place in PLACES]
)
@settings(max_examples=2)
@given(program=chains(), share=st.sampled_from([0.3, 0.8, 0.99]))
def test_the_search_equals_trying_every_plan(place: str, program: Program, share: float) -> None:
    """With a memory limit, recomputation and offload, each plan counted exactly in the program that runs."""
    planning = problem_of(program, *PLACES[place])
    check_optimal(EveryPlan(searched(planning)), float(int(share * exact_peak(planning, Search()(planning).choice))))


@pytest.mark.slow
@settings(max_examples=60)
@given(st.one_of(chains(), st.just(sines(1))), st.sampled_from(list(PLACES)), st.integers(0, 999), st.booleans())
def test_at_the_memory_of_any_plan_and_a_byte_below(program: Program, place: str, seed: int, fits: bool) -> None:
    """Where the least difference in the count is one in the plan."""
    planning = problem_of(program, *PLACES[place])
    problem = searched(planning)
    exact, free = ExactRecompute(problem), Search()(planning)
    near = changed(problem.assignment, free.choice, np.random.default_rng(seed))
    check_optimal(EveryPlan(problem), float(exact.counted(near).used().max()) - (not fits))


def test_a_plan_that_the_tables_count_too_large_is_found() -> None:
    """Where copies that depend on three variables were counted twice, it was refused, and a slower one taken."""
    planning = problem_of(sines(2), LINE)
    limit = float(int(0.8 * exact_peak(planning, Search()(planning).choice)))
    found, tabled = found_within(EveryPlan(searched(planning)), limit), Search(limit)(searched(planning))
    assert found.peak_bytes() <= limit
    assert found.solution.cost < 0.995 * tabled.cost


def test_a_search_that_runs_out_of_time_falls_back_on_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it finds then fits all the same, and is no cheaper."""
    planning = problem_of(sines(1), LINE)
    limit = float(int(0.8 * exact_peak(planning, Search()(planning).choice)))
    best = solve_jointly(planning, Search(limit), {}, ()).solution.cost
    monkeypatch.setattr("passes.recomputation.recompute_search.cheapest_that_fits", out_of_time)
    monkeypatch.setattr("passes.recomputation.prove_plan.cheaper_that_fits", lambda *_: (None, 0.0))
    for recompute in (False, True):
        found = solve_jointly(planning, Search(limit), {}, (), recompute=recompute)
        assert found.peak_bytes() <= limit
        assert found.solution.cost >= best * (1 - 1e-9)


@pytest.mark.parametrize("share", [0.6, 0.8])
def test_the_exact_count_has_the_last_word(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """What tables found, or did not, is made the cheapest, and proven, as where the exact search comes first."""
    planning = problem_of(sines(1), LINE)
    limit = float(int(share * exact_peak(planning, Search()(planning).choice)))
    best = solve_jointly(planning, Search(limit), {}, ()).solution.cost
    monkeypatch.setattr("passes.planning.search_exactly.MOST_PAIRS", 0)
    monkeypatch.setattr("passes.recomputation.prove_plan.MOST_PAIRS", 0)
    found = solve_jointly(planning, Search(limit), {}, ())
    assert found.peak_bytes() <= limit
    assert found.solution.cost == pytest.approx(best, rel=1e-9)
    assert found.solution.lower_bound == pytest.approx(best, rel=1e-8)
    monkeypatch.setattr("passes.recomputation.recompute_search._where_memory_binds", nothing_fits)
    first = solve_jointly(planning, Search(limit), {}, ()).solution
    assert (first.cost, first.lower_bound) == pytest.approx((best, best), rel=1e-8)


def nothing_fits(*_: object, **__: object) -> None:
    raise DoesNotFitError("no plan was found that fits", smallest_bytes=0)


def out_of_time(*_: object) -> None:
    raise TimeoutError


@pytest.mark.slow
@settings(max_examples=60)
@given(st.data(), programs(max_blocks=1, whole_steps=None), st.sampled_from([LINE, THREE]))
def test_the_search_of_drawn_programs_equals_trying_every_plan(
    data: st.DataObject, drawn: DrawnProgram, mesh: Mesh
) -> None:
    """In the memory of any of the cheapest plans, and a byte below."""
    every = EveryPlan(searched(problem_of_drawn(drawn, mesh)))
    assume(is_searched_exactly(every.problem.assignment))
    check_drawn(data, every)
    event(f"pairs of options: {'more than' if pairs_of(every) > 1_500 else 'up to'} 1,500")


def check_drawn(data: st.DataObject, every: EveryPlan) -> None:
    """See `check_optimal`, in the memory of some plan, or a byte below."""
    plans, _ = every.first(MOST_DRAWN)
    some = data.draw(st.lists(st.sampled_from(plans), min_size=1, max_size=20))
    peaks = sorted({every.counted(*plan)[1] for plan in some})
    check_optimal(every, data.draw(st.sampled_from(peaks)) - data.draw(st.integers(0, 1)))


def pairs_of(every: EveryPlan) -> int:
    """Pairs of options over all edges."""
    return sum(edge.cost.size for edge in every.problem.assignment.edges)


@pytest.mark.slow
@settings(max_examples=60)
@given(st.data(), programs(max_blocks=1, whole_steps=None), st.sampled_from(["square", "square of two nodes"]))
def test_the_search_on_two_axes_equals_trying_every_plan(data: st.DataObject, drawn: DrawnProgram, place: str) -> None:
    """Of drawn programs, with constraints or without: where tables come first, and the exact search has the last word.

    How much is tried is limited by the oracle only.
    """
    planning = problem_of_drawn(drawn, *PLACES[place])
    constraints = drawn_constraints(data, planning) if data.draw(st.booleans()) else {}
    every = EveryPlan(searched(planning), allowed_options(planning, constraints))
    assume(pairs_of(every) <= MOST_PAIRS_TO_PROVE)
    assume(largest_table(every.choices()) <= MOST_ENTRIES)
    check_drawn(data, every)
    event(f"pairs of options: {'more than' if pairs_of(every) > MOST_PAIRS else 'up to'} {MOST_PAIRS:,}")
    event(f"constraints: {'some' if constraints else 'none'}")


def drawn_constraints(data: st.DataObject, planning: PlanningProblem) -> dict[str, PartitionSpec]:
    """Where some parameters and inputs lie; together they allow something."""
    sites = {site: name for name, site in constrainable(planning.space).items() if site != name}
    some = data.draw(st.lists(st.sampled_from(sorted(sites)), unique=True))
    specs = {sites[site]: data.draw(st.sampled_from(own_specs(planning.space.sites[site]))) for site in some}
    assume(np.isfinite(Search()(planning, allowed_options(planning, specs)).cost))
    return specs


@settings(max_examples=50)
@given(assignments(with_memory=False))
def test_the_oracle_lists_all_choices_the_cheapest_first(problem: Assignment) -> None:
    """Those of finite cost, each once."""
    found = list(cheapest_first(problem))
    every = product(*(range(len(cost)) for cost in problem.costs))
    assert sorted(found) == [choice for choice in every if np.isfinite(problem.cost_of(choice))]
    costs = [problem.cost_of(choice) for choice in found]
    assert all(after >= before - 1e-12 for before, after in pairwise(costs))


class Square(nn.Module):
    """Of embedded tokens: two operands of one call are the same value."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded = self.embed(tokens)
        return (embedded * embedded).mean()


def square() -> Program:
    return trace(Square(), (torch.zeros(8, 8, dtype=torch.int64),), {})


@pytest.mark.parametrize(("program", "share"), [(partial(sines, 2), 1.2), (square, 1.3)], ids=["sines", "square"])
def test_the_oracle_loses_no_plan_with_the_choices_that_repeat_it(program: Callable[[], Program], share: float) -> None:
    """Of all choices of nearly the least cost, with views that are held and values that are kept for nothing."""
    planning = problem_of(program(), THREE)
    problem = searched(planning)
    every, most = EveryPlan(problem), share * Search()(planning).cost
    costs = ((problem.assignment.cost_of(choice), choice) for choice in cheapest_first(problem.assignment))
    choices = [choice for _, choice in takewhile(lambda item: item[0] < most, costs)]
    plans, are_all = every.first(len(choices), most)
    assert are_all
    assert set(plans) == set(map(every.plan_of, choices))
    assert len(plans) < len(choices)
