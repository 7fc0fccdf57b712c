"""A search that begins with another plan's recipe finds the same result."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import pytest

import autoshard
from autoshard import Cluster, NotAvailableError, Plan
from autoshard.ir.execution import Execution
from passes.driver.recipe_search import problem_of
from passes.search.recipe_problem import RecipeProblem, known_recipe
from passes.search.recipe_space import Only
from tests.passes.decoders import PRICED, dense, priced_dense, tokens

MODEL = dense(4)
FOUR, EIGHT = Cluster("h100_sxm", 1, 4), Cluster("h100_sxm", 1, 8)
OPTIONS = {"optimizer": "adamw", "runtime": PRICED, "global_batch": 8, "constraints": {"micro_batch": (1, 2)}}


@cache
def plan() -> Plan:
    """Return the plan of a search without an earlier plan."""
    return autoshard.plan(MODEL, FOUR, example_inputs=tokens(), **OPTIONS)


def problem(cluster: Cluster, *, batch: int = 8, limit: float = 80e9, pinned: Only | None = None) -> RecipeProblem:
    """The recipe problem that `plan` searches, with another cluster, batch, limit or constraint."""
    return problem_of(
        priced_dense(4).counted,
        cluster,
        Execution(global_batch=batch),
        int(limit),
        {"micro_batch": (1, 2), **(pinned or {})},
    )


def test_the_same_recipe_is_found() -> None:
    """From the plan's own recipe, a search finds the same recipe and baselines, with a gap of zero."""
    again = autoshard.plan(MODEL, FOUR, example_inputs=tokens(), previous=plan(), **OPTIONS)
    assert (again.recipe, again.objective, again.gap) == (plan().recipe, plan().objective, 0.0)
    assert again.baselines == plan().baselines


def test_a_recipe_that_will_do_is_the_first() -> None:
    """An earlier recipe is adapted to a larger batch, and a search from it equals a search without it."""
    before = plan().recipe
    assert before is not None
    other = problem(FOUR, batch=16)
    known = known_recipe(other, before)
    assert known is not None
    assert (known.batch, known.words.partition(";")[0]) == (16, before.words.partition(";")[0])
    warm, cold = other.best_of_all(known=known)[0], other.best_of_all()[0]
    assert (warm.recipe, warm.objective, warm.lower_bound) == (cold.recipe, cold.objective, cold.lower_bound)


def test_a_faster_recipe_from_elsewhere_is_kept() -> None:
    """A known recipe that is faster than all recipes within the constraints is the result, and its time the bound."""
    whole = problem_of(priced_dense(4).counted, FOUR, Execution(global_batch=8), int(80e9), {}).best()
    slow = {"recompute": ("full",)}
    found, _ = problem(FOUR, pinned=slow).best_of_all(known=whole.recipe)
    assert (found.recipe, found.objective, found.lower_bound) == (whole.recipe, whole.objective, whole.objective)
    assert problem(FOUR, pinned=slow).best().objective > whole.objective


def test_known_recipes_that_time_ran_out_for_are_no_baselines() -> None:
    """Without search time the result is the earlier recipe, and kinds that were not searched are no baselines."""
    before = plan()
    again = autoshard.plan(MODEL, FOUR, example_inputs=tokens(), previous=before, time_budget_s=0.0, **OPTIONS)
    assert again.recipe == before.recipe
    assert None not in again.baselines.values()
    assert len(again.baselines) < len(before.baselines)


def test_constraints_are_kept() -> None:
    """A known recipe is dropped if it breaks a constraint, does not fit, or has another number of devices."""
    recipe = Execution(data=4, zero=1)
    assert known_recipe(problem(FOUR), recipe) is not None
    assert known_recipe(problem(FOUR, pinned={"pipeline": (2,)}), recipe) is None
    assert known_recipe(problem(FOUR, limit=1.0), recipe) is None
    assert known_recipe(problem(EIGHT), recipe) is None


def test_what_a_search_cannot_begin_with_is_refused() -> None:
    """`previous=` is refused if it has no recipe, if `global_batch=` is missing, or if `recipe=` is given."""
    specs = autoshard.plan(MODEL, FOUR.mesh({"data": 4}), example_inputs=tokens(4))
    for wrong, message in ((specs, "has no recipe; with global_batch=, pass"), (3, "is a int; pass a plan")):
        with pytest.raises(NotAvailableError, match=message):
            autoshard.plan(MODEL, FOUR, example_inputs=tokens(), previous=cast("Any", wrong), **OPTIONS)
    for other, message in (
        ({}, "prices a recipe; pass global_batch="),
        (
            {"recipe": Execution(data=4), "global_batch": 8, "runtime": "megatron"},
            "recipe= is priced without one: leave one out",
        ),
    ):
        with pytest.raises(NotAvailableError, match=message):
            autoshard.plan(MODEL, FOUR, example_inputs=tokens(), previous=plan(), **other)
