"""The loop over candidates decides which candidates are planned.

It returns the fastest plan, or raises the most useful error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from autoshard import AutoshardError, DoesNotFitError, Mesh, NotAvailableError, Recipe
from autoshard.ir.request import Request
from passes.driver.candidates import Candidate, candidates_of, with_batch
from passes.driver.plan_candidates import Planned, plan_candidates
from passes.driver.planner import Planner
from passes.solver.search_control import Ceiling

REQUEST = Request(nn.Linear(2, 2), (torch.zeros(8, 2),), {}, grad=True)
ALONE = Mesh({"data": 1})


@dataclass(frozen=True)
class FakePlan:
    """Stand-in for a plan, with the fields that the loop reads."""

    predicted: Any
    recompute: Any
    offload: Any
    stages: tuple[Any, ...] = ()
    was_interrupted: bool = False
    was_cut: bool = False
    recipe: Recipe | None = None
    baselines: Mapping[str, float] = field(default_factory=dict)


def test_a_plan_of_stages_that_recompute_is_not_plain() -> None:
    """A plan is plain if neither the plan nor any of its stages recomputes or offloads."""
    nothing, some = SimpleNamespace(nodes=()), SimpleNamespace(nodes=("mm",))
    stages = [FakePlan(None, recompute, offload) for recompute, offload in product((nothing, some), repeat=2)]
    made = [FakePlan(None, nothing, nothing, stages=(stages[0], stage)) for stage in stages]
    plans = [Planned(cast(Planner, None), REQUEST, cast(Any, None), cast(Any, plan)) for plan in made]
    assert [plan.is_plain for plan in plans] == [True, False, False, False]


@dataclass(frozen=True)
class PlannerOf:
    """A stand-in for a planner, with ready plans.

    Args:
        plans: for each number of micro-batches, the step's seconds, the recomputed and the offloaded nodes; or an
            error.
        asked: the planned numbers of micro-batches, each with the sequences of one micro-batch.
        ceiling: time limit of all searches, which is reached when `cut_at` candidates are planned.
        traces: unused, because the stand-in traces nothing.
        slow: the only part in the breakdown of a step, with a tenth of the step's time.
    """

    plans: Mapping[int, tuple[float, set[str], set[str]] | AutoshardError]
    asked: list[tuple[int, int]] = field(default_factory=list)
    ceiling: Ceiling = field(default_factory=Ceiling)
    cut_at: int = 99
    recipe: Recipe | None = None
    micro_batches: int = 1
    time_budget_s: float = 1.0
    traces: Any = None
    slow: str = "recompute"

    def begun(self) -> tuple[PlannerOf, Ceiling]:
        return self, self.ceiling

    def plan_call(self, request: Request, meshes: Sequence[Mesh]) -> tuple[None, Any]:
        self.asked.append((self.micro_batches, len(request.args[0])))
        if len(self.asked) == self.cut_at:
            self.ceiling.until = 0.0
            self.ceiling.cuts()
        made = self.plans[self.micro_batches]
        if isinstance(made, AutoshardError):
            raise made
        seconds, again, away = made
        parts = (
            SimpleNamespace(step_time_s=seconds, breakdown={self.slow: 0.1 * seconds}),
            SimpleNamespace(nodes=again),
            SimpleNamespace(nodes=away),
        )
        return None, FakePlan(*parts)


def planned(planner: PlannerOf, candidates: Sequence[Candidate]) -> Planned:
    return plan_candidates(
        cast(Planner, planner), candidates, lambda parts: with_batch(REQUEST, 8 // parts), lambda: None
    )


CASES = {
    "the first keeps all": ({1: (1.0, set(), set())}, 1),
    "the first recomputes": ({1: (3.0, {"a"}, set()), 2: (2.0, set(), set())}, 2),
    "the first offloads": ({1: (3.0, set(), {"a"}), 2: (2.0, set(), set())}, 2),
    "recomputing is faster": ({1: (1.0, {"a"}, set()), 2: (2.0, set(), set())}, 1),
    "none keeps all": ({parts: (1.0 / parts, {"a"}, {"b"}) for parts in (1, 2, 4, 8)}, 8),
}


@pytest.mark.parametrize("case", CASES)
def test_micro_batches_become_more_until_all_is_kept(case: str) -> None:
    """More micro-batches are tried until a plan recomputes and offloads nothing, and the fastest tried plan wins."""
    plans, chosen = CASES[case]
    planner, recipe = PlannerOf(plans), Recipe(data=1)
    found = planned(planner, candidates_of(recipe, [ALONE], 8))
    assert planner.asked == [(parts, 8 // parts) for parts in plans]
    assert found.planner.micro_batches == chosen


@pytest.mark.parametrize(("recompute", "is_named"), [("none", True), ("full", False), (None, False)])
def test_what_does_not_fit_may_with_recomputation(recompute: Any, is_named: bool) -> None:
    """If no plan fits and the recipe forbids recomputation, the error suggests `recompute=None`."""
    planner = PlannerOf({1: DoesNotFitError("No plan was found that fits.", smallest_bytes=7)})
    recipe = Recipe(data=1, micro_batch=8, recompute=recompute)
    with pytest.raises(DoesNotFitError, match=r"No plan was found that fits\.") as raised:
        planned(planner, candidates_of(recipe, [ALONE], 8))
    assert ("recompute=None" in str(raised.value)) is is_named
    assert raised.value.smallest_bytes == 7


def candidates(*parts: int, **options: Any) -> list[Candidate]:
    return [Candidate(meshes=[ALONE], micro_batches=count, **options) for count in parts]


@pytest.mark.parametrize(("cut_at", "tried"), [(1, 1), (2, 2), (9, 3)])
def test_others_are_planned_until_the_time_is_up(cut_at: int, tried: int) -> None:
    """All candidates share one time limit, and no further candidate is planned after it."""
    planner = PlannerOf({count: (count, set(), set()) for count in (1, 2, 4)}, cut_at=cut_at)
    planned(planner, candidates(1, 2, 4))
    assert len(planner.asked) == tried


@pytest.mark.parametrize("cut_at", [1, 9])
def test_all_are_tried_until_one_has_a_plan(cut_at: int) -> None:
    """If no candidate has a plan, all are tried past the time limit. The error states the least known memory."""
    failures = {count: DoesNotFitError("no.", smallest_bytes=10 - count) for count in (1, 2, 4)}
    failures[1] = DoesNotFitError("nothing known.", smallest_bytes=0)
    planner = PlannerOf(failures, cut_at=cut_at)
    with pytest.raises(DoesNotFitError) as raised:
        planned(planner, candidates(1, 2, 4))
    assert len(planner.asked) == 3
    assert raised.value.smallest_bytes == 6


def test_a_spare_candidate_is_planned_where_no_other_has_a_plan() -> None:
    """A spare candidate is planned only if no other candidate has a plan."""
    first, spare = candidates(1), candidates(2, is_spare=True)
    found = planned(planner := PlannerOf({1: (2.0, set(), set()), 2: (1.0, set(), set())}), [*first, *spare])
    assert (found.step_time_s, planner.asked) == (2.0, [(1, 8)])
    failed = PlannerOf({1: NotAvailableError("no."), 2: (1.0, set(), set())})
    assert planned(failed, [*first, *spare]).step_time_s == 1.0


@pytest.mark.parametrize(("cut_at", "step_s", "tried"), [(1, 1.6, 2), (1, 1.4, 1), (9, 1.6, 1)])
def test_a_plan_far_slower_than_its_recipe_has_another_within_it(cut_at: int, step_s: float, tried: int) -> None:
    """If time cut a search and its plan is far slower than the recipe's price, the recipe itself is planned too."""
    planner = PlannerOf({1: (step_s, set(), set())}, cut_at=cut_at)
    found = planned(planner, candidates(1, price_s=1.0, exact=Recipe(data=1)))
    assert found.plan.was_cut is (cut_at == 1)
    assert len(planner.asked) == tried


@pytest.mark.parametrize(("price_s", "is_planned"), [(None, True), (1.89, True), (1.97, False), (3.0, False)])
def test_stages_are_planned_where_their_price_promises_a_gain(price_s: float | None, is_planned: bool) -> None:
    """Pipeline stages are planned if their price is unknown, or clearly below the step time without stages."""
    asked: list[str] = []

    def check_stages() -> None:
        asked.append("stages")
        raise NotAvailableError("no stages here.")

    staged = Candidate(meshes=[Mesh({"pipeline": 2})], micro_batches=2, price_s=price_s)
    planner = cast(Planner, PlannerOf({1: (2.0, set(), set())}))
    found = plan_candidates(
        planner, [*candidates(1), staged], lambda parts: with_batch(REQUEST, 8 // parts), check_stages
    )
    assert found.step_time_s == 2.0
    assert bool(asked) is is_planned


SAVES: tuple[set[str], set[str]] = ({"a"}, set())
SENT, AGAIN = "communication over data", "recompute"
SIZES = {
    "larger is faster": ({2: 3.0, 1: 2.0}, SENT, [2, 1], 1),
    "larger is slower": ({2: 2.0, 1: 3.0}, SENT, [2, 1], 2),
    "smaller is faster": ({2: 3.0, 4: 2.0, 8: 2.5}, AGAIN, [2, 4, 8], 4),
    "smaller is little faster": ({2: 3.0, 4: 2.95}, AGAIN, [2, 4], 4),
    "nothing to gain": ({2: 2.0}, "forward compute", [2], 2),
}


@pytest.mark.parametrize("case", SIZES)
def test_the_size_of_micro_batches_changes_while_the_plan_becomes_faster(case: str) -> None:
    """Larger micro-batches are tried if the plan communicates much, smaller ones if it recomputes much.

    The trials end when the step gets no faster.
    """
    steps, slow, tried, best = SIZES[case]
    planner = PlannerOf({parts: (step_s, *SAVES) for parts, step_s in steps.items()}, slow=slow)
    (first,) = candidates(2, proposal=Recipe(data=1, micro_batch=4), varies=True)
    found = planned(planner, [first])
    assert [parts for parts, _ in planner.asked] == tried
    assert (found.planner.micro_batches, found.plan.recipe) == (best, Recipe(data=1, micro_batch=8 // best))


@pytest.mark.parametrize(
    ("saves", "options"),
    [((set(), set()), {"varies": True}), (SAVES, {"varies": False})],
    ids=["the plan keeps all", "the size is fixed"],
)
def test_the_size_of_micro_batches_stays(saves: tuple[set[str], set[str]], options: dict[str, bool]) -> None:
    """No other micro-batch size is tried if the plan recomputes nothing, or if the user fixed the size."""
    planner = PlannerOf({2: (1.0, *saves)})
    planned(planner, candidates(2, proposal=Recipe(data=1, micro_batch=4), **options))
    assert [parts for parts, _ in planner.asked] == [2]


@pytest.mark.parametrize(("price_s", "tried"), [(0.95, [2, 4]), (1.05, [2])])
def test_smaller_micro_batches_are_planned_where_their_price_promises_a_gain(price_s: float, tried: list[int]) -> None:
    """Micro-batches of half the size are planned only if their price is below the price of the present size."""
    planner = PlannerOf({2: (3.0, *SAVES), 4: (3.5, *SAVES)}, slow=AGAIN)
    (first,) = candidates(2, proposal=Recipe(data=1, micro_batch=4), varies=True)
    planned(planner, [replace(first, price_of_size={4: 1.0, 2: price_s}.__getitem__)])
    assert [parts for parts, _ in planner.asked] == tried


@pytest.mark.parametrize(
    ("price_s", "recompute", "saves", "is_planned"),
    [(1.97, "none", False, False), (1.8, "none", False, True), (1.97, "full", False, True), (1.97, "none", True, True)],
)
def test_prices_of_recipes_that_keep_all_are_believed(
    price_s: float, recompute: Any, saves: bool, is_planned: bool
) -> None:
    """If the best plan and a recipe both keep all values, the recipe is planned only if its price is clearly lower."""
    planner = PlannerOf({1: (2.0, {"a"} if saves else set(), set()), 2: (2.0, set(), set())})
    exact = Recipe(data=1, recompute=recompute, offload="none")
    planned(planner, [*candidates(1), *candidates(2, price_s=price_s, exact=exact)])
    assert (len(planner.asked) == 2) is is_planned


def test_prices_of_recipes_that_split_experts_are_not_believed() -> None:
    """A recipe that splits experts is planned although its price promises no gain, because its plan may be faster."""
    planner = PlannerOf({1: (2.0, set(), set()), 2: (1.8, set(), set())})
    exact = Recipe(data=2, expert=2, recompute="none", offload="none")
    best = planned(planner, [*candidates(1), *candidates(2, price_s=1.99, exact=exact, proposal=exact)])
    assert best.step_time_s == 1.8
