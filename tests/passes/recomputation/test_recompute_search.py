"""Plans recompute in little memory, and are faster in more memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import islice, pairwise, product, takewhile

import numpy as np
import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from autoshard.errors import DoesNotFitError
from autoshard.ir.mesh import Mesh
from autoshard.ir.offload import NO_OFFLOAD
from autoshard.ir.plan import Plan
from autoshard.ir.program import Program
from autoshard.ir.recompute import NO_RECOMPUTE
from autoshard.ir.spec import PartitionSpec
from autoshard.testing.programs import DrawnProgram, programs
from passes.driver.plan_and_lower import plan_program, planning_problem
from passes.driver.plan_options import PlanOptions
from passes.planning.build_assignment import PlanningProblem
from passes.planning.constraints import allowed_options, constrainable, own_specs
from passes.planning.search import Search, restrict
from passes.prediction.utilisation import utilisation
from passes.recomputation import fitting, recompute_search
from passes.recomputation.plan_before import solution_of
from passes.recomputation.recompute_options import RecomputeOptions, find_options
from passes.recomputation.recompute_problem import RecomputeProblem, Restored, build_recompute_problem
from passes.recomputation.with_restored import with_restored
from passes.solver.assignment import Assignment
from passes.solver.search_control import SearchControl, SearchProgress
from tests.passes.blocks import (
    blocks_program,
    h100s,
    peak_of,
    perceptron_program,
    problem_of,
    problem_of_drawn,
    two_nodes,
)
from tests.passes.recomputation.cheap_choices import cheapest_first, largest_table
from tests.passes.recomputation.test_recompute_problem import chains, drawn_choice, joint
from tests.passes.solver.drawn_assignments import assignments

LINE, SQUARE, THREE = Mesh({"x": 2}), Mesh({"x": 2, "y": 2}), Mesh({"x": 3})


@cache
def program() -> Program:
    return blocks_program(batch=64, length=128, hidden=128)


@cache
def problem() -> PlanningProblem:
    return planning_problem(program(), LINE, h100s(LINE), PlanOptions())


@cache
def plan_within(budget: float | None, *, recompute: bool = True, seconds: float = math.inf) -> Plan:
    """The plan of `program()` on two H100s within a memory budget in bytes, or without a limit."""
    options = PlanOptions(memory_budget=budget, recompute=recompute, with_baselines=False)
    options = dataclasses.replace(options, control=SearchControl.within(seconds))
    return plan_program(program(), LINE, h100s(LINE), options)


@cache
def largest() -> float:
    return float(plan_within(None).predicted.peak_memory_bytes)


def test_what_fits_recomputes_nothing() -> None:
    """In the memory of the fastest plan, the plan recomputes nothing and has the same cost."""
    plan = plan_within(largest())
    assert plan.recompute == NO_RECOMPUTE
    assert plan.objective == plan_within(None).objective
    assert "Recompute" not in str(plan)


def test_step_time_never_rises_with_memory() -> None:
    """In rising memory each plan fits, costs never rise, and the least memory recomputes most."""
    shares = (0.6, 0.7, 0.8, 0.9, 1.0)
    plans = [plan_within(share * largest()) for share in shares]
    for share, plan in zip(shares, plans, strict=True):
        assert plan.predicted.peak_memory_bytes <= share * largest()
    costs = [plan.objective for plan in plans]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] > costs[-1]
    saved = [plan.recompute.saved_bytes for plan in plans]
    assert saved[0] == max(saved) > 0
    assert saved[-1] == 0


@pytest.mark.parametrize("looks", [1, 12])
def test_a_search_that_is_stopped_gives_a_plan_that_fits(looks: int) -> None:
    """A search stopped at its first or twelfth report finds a plan that fits.

    Its bound is at most the full search's cost.
    """
    control, shown = SearchControl(), []

    def show(progress: SearchProgress) -> None:
        shown.append(progress)
        control.is_stopped = len(shown) >= looks

    control.show = show
    budget = 0.9 * largest()
    options = PlanOptions(memory_budget=budget, with_baselines=False, control=control)
    found = plan_program(program(), LINE, h100s(LINE), options)
    whole = plan_within(budget)
    assert found.was_interrupted
    assert found.predicted.peak_memory_bytes <= budget
    assert found.lower_bound is not None
    assert found.lower_bound <= whole.objective * (1 + 1e-9)
    assert whole.lower_bound is not None
    assert whole.lower_bound <= found.objective * (1 + 1e-9)


def test_a_search_that_is_stopped_while_it_builds_gives_what_fits_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a search is stopped while it builds the recomputation problem, its plan fits without recomputation."""
    control = SearchControl()
    monkeypatch.setattr(recompute_search, "build_recompute_problem", lambda *_, **__: control.stop())
    budget = 0.9 * largest()
    options = PlanOptions(memory_budget=budget, with_baselines=False, control=control)
    found = plan_program(program(), LINE, h100s(LINE), options)
    assert found.was_interrupted
    assert found.recompute == NO_RECOMPUTE
    assert found.predicted.peak_memory_bytes <= budget


@pytest.mark.slow
def test_time_that_is_up_while_it_builds_gives_what_fits_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """If time ends while the problem is built, the best fitting baseline wins.

    Without a fitting baseline, building continues.
    """

    def late(
        planning: PlanningProblem, options: RecomputeOptions, *, control: SearchControl | None
    ) -> RecomputeProblem:
        return build_recompute_problem(planning, options, control=control and SearchControl.within(0.0))

    monkeypatch.setattr(recompute_search, "build_recompute_problem", late)
    budget = 0.9 * largest()
    for with_baselines in (True, False):
        options = PlanOptions(memory_budget=budget, with_baselines=with_baselines)
        found = plan_program(program(), LINE, h100s(LINE), options)
        assert found.predicted.peak_memory_bytes <= budget
        keeps_all = (found.recompute, found.offload) == (NO_RECOMPUTE, NO_OFFLOAD)
        assert keeps_all is any(cost is not None for cost in found.baselines.values())


@pytest.mark.parametrize("with_baselines", [False, True])
@pytest.mark.parametrize("share", [0.6, 0.9, 2.0])
def test_a_search_without_time_gives_a_plan_that_fits(share: float, with_baselines: bool) -> None:
    """A search without time finds a plan that fits, has a lower bound, and prices no baseline."""
    budget = share * largest()
    options = PlanOptions(memory_budget=budget, control=SearchControl.within(0.0), with_baselines=with_baselines)
    found = plan_program(program(), LINE, h100s(LINE), options)
    assert (found.was_cut, found.was_interrupted) == (True, False)
    assert not found.baselines
    assert found.predicted.peak_memory_bytes <= budget
    assert found.lower_bound is not None
    assert found.lower_bound <= plan_within(budget).objective * (1 + 1e-9)


def test_recomputation_is_never_worse() -> None:
    """A plan that may recompute costs at most 1 % more than a plan that may not."""
    budget = 0.8 * largest()
    try:
        without = plan_within(budget, recompute=False).objective
    except DoesNotFitError:
        without = float("inf")
    assert plan_within(budget).objective <= without * 1.01


def test_nothing_is_worse_than_what_it_starts_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the search may not make any attempt, the result costs at most as much as the given start."""
    monkeypatch.setattr(fitting, "_ATTEMPTS", 0)
    budget = 0.9 * largest()
    start = Search(budget)(problem())
    found = recompute_search.solve_jointly(problem(), Search(budget), {}, [start], peak_of)
    assert found.peak_bytes(peak_of) <= budget
    assert found.solution.lower_bound <= found.solution.cost <= start.cost


@pytest.mark.parametrize(("recompute", "seconds"), [(False, math.inf), (True, 0.0)])
def test_a_start_that_fits_better_than_the_tables_say_is_kept(recompute: bool, seconds: float) -> None:
    """A start that fits by exact count, but not by the tables, is kept without recomputation or without time."""
    planning = problem_of(perceptron_program(64), LINE)

    def half_the_table(planning: PlanningProblem, choice: Sequence[int]) -> float:
        return 0.5 * float(planning.usage(choice).max())

    start = Search(0.8 * float(planning.usage(Search()(planning).choice).max()))(planning)
    limit = half_the_table(planning, start.choice)
    search = Search(limit, control=SearchControl.within(seconds))
    found = recompute_search.solve_jointly(planning, search, {}, [start], half_the_table, recompute=recompute)
    assert found.solution.lower_bound <= found.solution.cost <= start.cost


@pytest.mark.parametrize("share", [0.6, 0.8, 1.0])
def test_a_plan_before_costs_what_it_did(share: float) -> None:
    """An earlier plan has the same cost, peak and restored values as a solution of the problem."""
    before = plan_within(share * largest())
    known = solution_of(before, problem(), {})
    assert known is not None
    assert known.solution.cost == pytest.approx(before.objective, rel=1e-9)
    assert known.peak_bytes(peak_of) == before.predicted.peak_memory_bytes
    assert known.restored == Restored(before.recompute.nodes, before.offload.nodes)


@pytest.mark.parametrize("seconds", [0.0, 0.3])
@pytest.mark.parametrize("shares", list(pairwise((0.6, 0.7, 0.8, 0.9, 1.0))))
def test_with_a_plan_before_more_memory_is_never_slower(shares: tuple[float, float], seconds: float) -> None:
    """With an earlier plan of a tighter limit, a plan in more memory is never slower, in any search time."""
    less, more = (share * largest() for share in shares)
    before = plan_within(less)
    control = SearchControl.within(seconds)
    options = PlanOptions(memory_budget=more, control=control, with_baselines=False, before=before)
    found = plan_program(program(), LINE, h100s(LINE), options)
    assert found.objective <= before.objective * (1 + 1e-9)
    assert found.lower_bound is not None
    assert found.lower_bound <= plan_within(more).objective * (1 + 1e-9)


def test_a_plan_before_that_does_not_fit_or_is_not_of_the_program_is_left() -> None:
    """An earlier plan that does not fit, or is of another program, is ignored."""
    before, budget = plan_within(None), 0.6 * largest()
    control = SearchControl.within(0.0)
    options = PlanOptions(memory_budget=budget, control=control, with_baselines=False, before=before)
    assert plan_program(program(), LINE, h100s(LINE), options).predicted.peak_memory_bytes <= budget
    assert solution_of(before, problem_of(blocks_program(batch=32, length=128, hidden=128), LINE), {}) is None
    assert solution_of(before, problem_of(program(), Mesh({"x": 4})), {}) is None


@pytest.mark.slow
def test_what_cannot_fit_is_said() -> None:
    """The error about too little memory names a smallest memory, and a plan fits this memory."""
    with pytest.raises(DoesNotFitError) as caught:
        plan_within(0.05 * largest(), seconds=30.0)
    smallest = caught.value.smallest_bytes
    assert 0.05 * largest() < smallest < 0.7 * largest()
    assert plan_within(float(smallest), seconds=30.0).predicted.peak_memory_bytes <= smallest


def test_time_and_flops_of_recomputation() -> None:
    """Recomputation costs the time of its clones; the hardware's FLOPs count clones, the model's do not."""
    plan, free = plan_within(0.6 * largest()), plan_within(None)
    assert plan.recompute.time_s > 0
    assert plan.predicted.breakdown["recompute"] > 0
    assert "recompute" not in free.predicted.breakdown
    assert plan.predicted.mfu is not None
    assert plan.predicted.hfu is not None
    model_s = plan.predicted.mfu * plan.predicted.step_time_s
    planning = problem_of(blocks_program(batch=64, length=128, hidden=128), LINE)
    assert model_s == pytest.approx(utilisation(planning, [0] * len(planning.members)).model_s)
    assert plan.predicted.hfu > plan.predicted.mfu


PLACES = {
    "line": (LINE, h100s(LINE)),
    "square": (SQUARE, h100s(SQUARE)),
    "square of two nodes": (SQUARE, two_nodes(SQUARE)),
}
"""Meshes and their clusters."""

MOST_CHOICES = 5_000
"""An example is skipped if more choices are cheaper than its found plan."""

MOST_ENTRIES = 30_000_000
"""An example is skipped if the oracle would make a larger table."""

NEAR = 0.01
"""Largest excess of a found plan's cost over the cheapest fitting plan."""


def searched(planning: PlanningProblem) -> RecomputeProblem:
    """The problem with recomputation and offload, as the planner searches it."""
    return build_recompute_problem(planning, find_options(planning, offload=True))


def check_near_the_best(
    planning: PlanningProblem, limit: float, allowed: Mapping[int, np.ndarray] | None = None
) -> None:
    """Check that a found plan fits exactly, and costs at most `NEAR` more than each choice that fits as tables count.

    The bound is at most the cost of every choice that fits by the count, so the gap is true.
    """
    problem, allowed = searched(planning), allowed or {}
    every = restrict(problem.assignment, problem.widen(allowed))
    assume(largest_table(every) <= MOST_ENTRIES)
    try:
        found = recompute_search.solve_jointly(planning, Search(limit), allowed, (), peak_of)
    except DoesNotFitError:
        some = islice(cheapest_first(every), MOST_CHOICES)
        assert all(problem.usage(choice).max() > limit for choice in some)
        event("nothing fits")
        return
    cost, bound = found.solution.cost, found.solution.lower_bound
    assert found.peak_bytes(peak_of) <= limit
    assert bound <= cost
    least = max(bound * (1 - 1e-8), (1 - NEAR) * cost)
    cheaper = list(islice(takewhile(lambda choice: every.cost_of(choice) < least, cheapest_first(every)), MOST_CHOICES))
    assume(len(cheaper) < MOST_CHOICES)
    assert all(problem.usage(choice).max() > limit for choice in cheaper)
    event(f"cheaper plans that do not fit: {'some' if cheaper else 'none'}")


@pytest.mark.parametrize(
    "place", [place if place == "line" else pytest.param(place, marks=pytest.mark.slow) for place in PLACES]
)
@settings(max_examples=2)
@given(program=chains(), share=st.sampled_from([0.3, 0.8, 0.99]))
def test_the_search_is_near_the_best_of_every_plan(place: str, program: Program, share: float) -> None:
    """With recomputation and offload, the plan costs at most 1 % more than the cheapest choice that fits."""
    planning = problem_of(program, *PLACES[place])
    check_near_the_best(planning, float(int(share * peak_of(planning, Search()(planning).choice))))


@pytest.mark.slow
@settings(max_examples=40)
@given(st.data(), programs(max_blocks=1, whole_steps=None), st.sampled_from([*PLACES, "three"]))
def test_the_search_is_near_the_best_of_drawn_programs(data: st.DataObject, drawn: DrawnProgram, place: str) -> None:
    """On drawn programs and constraints, the plan costs at most 1 % more than the cheapest choice that fits."""
    planning = problem_of_drawn(drawn, *PLACES.get(place, (THREE, h100s(THREE))))
    constraints = drawn_constraints(data, planning) if data.draw(st.booleans()) else {}
    problem = searched(planning)
    peak = float(problem.usage(drawn_choice(problem, data.draw(st.integers(0, 99)))).max())
    check_near_the_best(planning, peak - data.draw(st.integers(0, 1)), allowed_options(planning, constraints))
    event(f"constraints: {'some' if constraints else 'none'}")


def drawn_constraints(data: st.DataObject, planning: PlanningProblem) -> dict[str, PartitionSpec]:
    """Draw specs of some parameters and inputs, with at least one legal plan."""
    sites = {site: name for name, site in constrainable(planning.space).items() if site != name}
    some = data.draw(st.lists(st.sampled_from(sorted(sites)), unique=True))
    specs = {sites[site]: data.draw(st.sampled_from(own_specs(planning.space.sites[site]))) for site in some}
    assume(np.isfinite(Search()(planning, allowed_options(planning, specs)).cost))
    return specs


@pytest.mark.parametrize("seed", range(3))
def test_tables_count_no_less_than_what_runs(seed: int) -> None:
    """For drawn choices, tables count at least the peak of the lowered program."""
    problem = joint(problem_of(perceptron_program(64), LINE))
    choice = drawn_choice(problem, seed)
    running = with_restored(problem.planning, problem.restored(choice))
    assert problem.usage(choice).max() >= peak_of(running, problem.without_policies(choice))


@settings(max_examples=50)
@given(assignments(with_memory=False))
def test_the_oracle_lists_all_choices_the_cheapest_first(problem: Assignment) -> None:
    """`cheapest_first` lists each choice of finite cost once, in ascending cost."""
    found = list(cheapest_first(problem))
    every = product(*(range(len(cost)) for cost in problem.costs))
    assert sorted(found) == [choice for choice in every if np.isfinite(problem.cost_of(choice))]
    costs = [problem.cost_of(choice) for choice in found]
    assert all(after >= before - 1e-12 for before, after in pairwise(costs))
