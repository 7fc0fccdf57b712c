"""Best recipes of a problem: of each known kind, with fixed fields, and after Ctrl-C."""

from __future__ import annotations

import dataclasses
import math
from functools import cache

import pytest

from autoshard import Cluster, RecipeError
from autoshard.ir.execution import Execution
from passes.search.recipe_problem import RecipeProblem, known_kinds
from passes.search.search_recipes import FoundRecipe
from tests.passes.decoders import priced_sparse

CLUSTER = Cluster("h100_sxm", 2, 2)


@cache
def _problem() -> RecipeProblem:
    return RecipeProblem(priced_sparse().counted, CLUSTER, Execution(global_batch=8), math.inf, 8)


def test_no_known_kind_beats_the_best_recipe() -> None:
    """Each known kind, such as FSDP, has its own best recipe, which is no faster than the best of all recipes."""
    best, baselines = _problem().best(), _problem().baselines()
    assert baselines.keys() == known_kinds(CLUSTER, has_experts=True).keys()
    assert min(found.objective for found in baselines.values()) >= best.objective
    recipes = {name: found.recipe for name, found in baselines.items() if found.recipe is not None}
    assert (recipes["data parallel"].data, recipes["data parallel"].zero) == (4, 0)
    assert (recipes["FSDP"].zero, recipes["HSDP"].zero_group) == (3, 2)
    assert recipes["Megatron TP+SP+PP"].sequence_parallel
    assert recipes["Megatron TP+SP+PP"].pipeline > 1
    assert recipes["expert parallel"].expert > 1


def test_a_kind_that_does_not_fit_has_no_recipe() -> None:
    """In the least memory of any recipe, the kind "data parallel" has no recipe."""
    least = _problem().smallest().objective
    assert dataclasses.replace(_problem(), memory_limit=least).baselines()["data parallel"].recipe is None


def test_a_kind_that_no_recipe_is_is_left_out() -> None:
    """Kinds that few sequences or constraints exclude are left out, and the search still finds the best recipe."""
    few = dataclasses.replace(_problem(), base=Execution(global_batch=2))
    assert "Megatron TP+SP" in few.baselines()
    assert few.baselines().keys().isdisjoint({"data parallel", "ZeRO-1", "FSDP", "HSDP"})
    pinned = dataclasses.replace(_problem(), pinned={"zero": (2,)})
    found, kinds = pinned.best_of_all()
    assert not kinds
    assert found == dataclasses.replace(pinned.best(), search_time_s=found.search_time_s)


@pytest.mark.parametrize("expert", [1, 2, 4])
@pytest.mark.parametrize("runs", [False, True])
def test_experts_can_be_fixed(expert: int, runs: bool) -> None:
    """A constraint fixes the expert degree, whether or not the search is limited to recipes that `compile` runs."""
    cluster = Cluster("h100_sxm", 1, 4)
    problem = RecipeProblem(priced_sparse().counted, cluster, Execution(global_batch=4), math.inf, 8, runs=runs)
    found, _ = dataclasses.replace(problem, pinned={"expert": (expert,)}).best_of_all()
    assert found.recipe is not None
    assert found.recipe.expert == expert


def test_fields_can_be_fixed() -> None:
    """The best recipe with fixed fields is no faster than the best of all; a field that is not searched is refused."""
    best = _problem().best()
    fixed = _problem().best(only={"pipeline": (2,), "zero": (1,)})
    assert fixed.recipe is not None
    assert (fixed.recipe.pipeline, fixed.recipe.zero) == (2, 1)
    assert fixed.objective == _problem().pricer.time_s(fixed.recipe) >= best.objective
    many = _problem().best(only={"pipeline": range(2, 5)})
    assert best.objective <= many.objective <= fixed.objective
    with pytest.raises(RecipeError, match="'precision' is not searched"):
        _problem().best(only={"precision": ("f8",)})


def test_ctrl_c_ends_all_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the third search ends all searches. The result is the best kind so far, with a bound of zero."""
    searches = []

    def best(self: RecipeProblem, **arguments: object) -> FoundRecipe:
        searches.append(arguments)
        if len(searches) == 3:
            raise KeyboardInterrupt
        return search(self, **arguments)

    search = RecipeProblem.best
    monkeypatch.setattr(RecipeProblem, "best", best)
    found, kinds = _problem().best_of_all()
    assert list(kinds) == ["data parallel", "ZeRO-1", "FSDP"]
    assert found.was_interrupted
    assert not found.is_complete
    assert (found.objective, found.lower_bound) == (min(each.objective for each in kinds.values()), 0.0)
