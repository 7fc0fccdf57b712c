"""Bounds on what ranks take lie below it, however shards are exchanged and blocks shared out."""

from __future__ import annotations

from itertools import combinations_with_replacement

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard import Cluster, Recipe
from passes.recipe_search.bound_ranks import exchanging, whole_blocks
from passes.recipe_search.pipe_shapes import pipe_shapes
from passes.recipe_search.recipe_pricer import RecipePricer
from passes.recipe_search.recipe_space import Pipe
from tests.passes.decoders import priced_dense, priced_sparse
from tests.passes.recipe_search.test_bound_recipes import NAMES, SECONDS, pipelines

MODELS = {"dense": priced_dense().counted, "sparse": priced_sparse().counted}


def pricer_of(name: str) -> RecipePricer:
    """What prices recipes of a model that differ in what is searched only."""
    return RecipePricer(MODELS[name], Cluster("h100_sxm", 2, 4))


@given(pipelines(), st.lists(SECONDS, min_size=4, max_size=4))
def test_some_rank_takes_as_long_as_the_floor_of_whole_blocks(
    drawn: tuple[Pipe, list[str], int], seconds: list[float]
) -> None:
    """Whatever the schedule, and however blocks of two kinds are shared out; with one stage on each rank, one does."""
    pipe, blocks, _ = drawn
    floor = whole_blocks(NAMES, tuple(blocks), pipe.pipeline).floor(np.array(seconds))
    assert floor <= (pipe_shapes(NAMES, tuple(blocks), (pipe,)).counts[0] @ seconds).max()
    alike, cuts = ("a",) * len(blocks), combinations_with_replacement(range(len(blocks) + 1), pipe.pipeline - 1)
    ways = (np.diff([0, *cut, len(alike)]) * seconds[1] + seconds[3] * np.eye(pipe.pipeline)[-1] for cut in cuts)
    assert whole_blocks(NAMES, alike, pipe.pipeline).floor(np.array(seconds)) == min(way.max() for way in ways)


RECIPES = st.builds(
    Recipe,
    data=st.just(8),
    zero=st.integers(0, 3),
    zero_group=st.sampled_from([None, 2, 4]),
    micro_batch=st.sampled_from([1, 16]),
    global_batch=st.sampled_from([128, 256]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    offload=st.sampled_from(["none", "activations"]),
    cuda_graph=st.booleans(),
    gradient_dtype=st.sampled_from(["f32", "bf16"]),
    overlap_gradients=st.booleans(),
    overlap_parameters=st.booleans(),
)


@pytest.mark.parametrize("name", list(MODELS))
@settings(max_examples=40)
@given(RECIPES)
def test_no_section_takes_less_than_its_work_beside_its_exchanges(name: str, recipe: Recipe) -> None:
    """Of what is found without exchanges; nor is a step shorter than its mean."""
    pricer = pricer_of(name)
    alone, exchanges = pricer.section_floors(recipe, gathers=False), pricer.exchanges(recipe)
    bounds = exchanging([alone], [exchanges], recipe, pricer.model).at(np.zeros(1))[0]
    assert (bounds <= pricer.section_floors(recipe).work * (1 + 1e-12)).all()
    assert pricer.mean_floors([recipe])[0] <= pricer.time_s(recipe)


def test_recipes_that_are_bounded_at_once_have_the_bounds_of_each_alone() -> None:
    """In time and in memory, whatever they exchange."""
    pricer = pricer_of("dense")
    recipes = [Recipe(data=8, zero=zero, zero_group=2, global_batch=64) for zero in (1, 2, 3)]
    recipes.append(Recipe(data=8, global_batch=64))
    assert pricer.mean_floors(recipes).tolist() == [pricer.mean_floors([each])[0] for each in recipes]
    at_once = pricer.pipeline_memory_floors(recipes, uneven=True)
    assert at_once.tolist() == [pricer.pipeline_memory_floors([each], uneven=True)[0] for each in recipes]
