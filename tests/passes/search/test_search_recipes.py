"""The search finds the best recipe of a full enumeration of its space."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard import Cluster
from autoshard.ir.execution import Execution
from passes.search.layers.price_model import CountedModel
from passes.search.recipe_plan import predict_recipe
from passes.search.recipe_problem import RecipeProblem
from passes.search.recipe_space import RecipeSpace
from passes.search.search_recipes import FoundRecipe
from passes.solver.search_control import Ceiling
from tests.passes.decoders import priced_dense, priced_sparse
from tests.passes.search.problems import RUNTIMES


def counted(name: str) -> CountedModel:
    """The counted model of a small dense or sparse decoder, traced once."""
    return (priced_dense(4) if name == "dense" else priced_sparse()).counted


def problem(name: str, devices: int, base: Execution, limit: float = math.inf) -> RecipeProblem:
    """The recipe problem of a small decoder on H100s, in nodes of up to four."""
    return RecipeProblem(
        counted(name), Cluster("h100_sxm", max(1, devices // 4), min(devices, 4)), base, limit, least_tokens=8
    )


def priced(found: RecipeProblem) -> list[tuple[float, int, Execution]]:
    """Return time, memory and recipe of every recipe of a problem."""
    space = RecipeSpace(found.counted, found.cluster.size, found.base, least_tokens=8, offloads=True)
    predictions = ((predict_recipe(found.counted, recipe, found.cluster), recipe) for recipe in space.recipes())
    return [(each.step_time_s, each.peak_memory_bytes, recipe) for each, recipe in predictions]


BASES = st.builds(Execution, global_batch=st.sampled_from([2, 4, 6]), runtime=RUNTIMES)


@settings(max_examples=4)
@given(st.sampled_from(["dense", "sparse"]), st.sampled_from([1, 2, 4]), BASES, st.floats(0, 1))
def test_it_finds_what_pricing_every_recipe_finds(name: str, devices: int, base: Execution, share: float) -> None:
    """At a drawn memory limit, the search finds the time and memory of the best recipe of a full enumeration.

    A byte below the least memory, the search finds no recipe.
    """
    whole = priced(problem(name, devices, base))
    sizes = sorted({memory for _, memory, _ in whole})
    limit = sizes[round(share * (len(sizes) - 1))]
    best = min((time, memory) for time, memory, _ in whole if memory <= limit)
    found = problem(name, devices, base, limit).best()
    assert found.recipe is not None
    prediction = predict_recipe(counted(name), found.recipe, problem(name, devices, base).cluster)
    assert (prediction.step_time_s, prediction.peak_memory_bytes) == best
    assert found.is_complete
    assert found.objective == found.lower_bound == best[0]
    assert problem(name, devices, base, sizes[0] - 1).best().recipe is None
    assert problem(name, devices, base).smallest().objective == sizes[0]


BASE = Execution(global_batch=16)


def test_a_search_that_ends_early_has_a_bound() -> None:
    """A search without time returns the known recipe, if any, and a bound of at most the best time."""
    whole = problem("dense", 4, BASE).best()
    nothing = problem("dense", 4, BASE).best(ceiling=Ceiling.within(0.0))
    assert (nothing.recipe, nothing.is_complete, nothing.was_cut) == (None, False, True)
    known = Execution(data=4, global_batch=16)
    early = problem("dense", 4, BASE).best(ceiling=Ceiling.within(0.0), known=known)
    assert (early.recipe, early.is_complete, early.was_cut) == (known, False, True)
    assert not whole.was_cut
    assert early.lower_bound <= whole.objective <= early.objective


def test_ctrl_c_keeps_the_best_recipe() -> None:
    """Ctrl-C returns the best recipe so far with a true bound; before any recipe, Ctrl-C is raised again."""

    def stop_with(recipe: bool) -> FoundRecipe:
        def watch(found: FoundRecipe) -> None:
            if (found.recipe is not None) == recipe:
                raise KeyboardInterrupt

        return problem("dense", 4, BASE).best(watch=watch)

    stopped = stop_with(recipe=True)
    assert stopped.recipe is not None
    assert (stopped.was_interrupted, stopped.was_cut) == (True, False)
    assert stopped.lower_bound <= problem("dense", 4, BASE).best().objective <= stopped.objective
    with pytest.raises(KeyboardInterrupt):
        stop_with(recipe=False)


def test_more_memory_is_never_slower() -> None:
    """A step is never slower with more memory, and one limit always gives one recipe."""
    least = problem("sparse", 2, BASE).smallest().objective
    found = [problem("sparse", 2, BASE, limit).best() for limit in (least, 1.5 * least, 3 * least, math.inf)]
    times = [each.objective for each in found]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]
    assert problem("sparse", 2, BASE, least).best().recipe == found[0].recipe
