"""Bounds on memory lie below what they bound."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard import Cluster, Recipe
from cost_models.schedule_orders import most_in_flight
from passes.recipe_search.bound_memory import pipe_ranks
from passes.recipe_search.pipe_shapes import pipe_shapes
from passes.recipe_search.recipe_pricer import RecipePricer
from passes.recipe_search.recipe_space import KEEPINGS, Keeping, RecipeSpace, Sharding, _pipes, schedule_of
from passes.sections.fold_program import AFTER, BEFORE
from passes.sections.price_model import CountedModel
from tests.passes.decoders import priced_dense, priced_sparse

MODELS = {"dense": priced_dense().counted, "sparse": priced_sparse().counted}


@given(st.integers(2, 9), st.integers(1, 40), st.data())
def test_a_rank_holds_a_micro_batch_for_itself_and_each_rank_behind_it(
    ranks: int, micro_batches: int, data: st.DataObject
) -> None:
    """Or all that there are, of each of its stages, whatever the schedule; under "zbv" ranks count from the last."""
    pipe = data.draw(st.sampled_from(_pipes(ranks, micro_batches, 3 * ranks)))
    held = most_in_flight(schedule_of(pipe), ranks, micro_batches, pipe.virtual_stages)
    for behind, count in enumerate(held if pipe.schedule == "zbv" else reversed(held)):
        assert count >= min(behind + 1, micro_batches) * pipe.virtual_stages


@given(st.integers(1, 6), st.lists(st.sampled_from(["a", "b"]), min_size=1, max_size=15), st.data())
def test_the_ranks_of_every_even_pipeline_are_among_those_that_bound_memory(
    ranks: int, blocks: list[str], data: st.DataObject
) -> None:
    """Those of "zbv" from the last to the first."""
    names = (BEFORE, "a", "b", AFTER)
    even = [pipe for pipe in _pipes(ranks, 2 * ranks, len(blocks)) if not pipe.uneven]
    if even:
        pipe = data.draw(st.sampled_from(even))
        counts = pipe_shapes(names, tuple(blocks), (pipe,)).counts[0][:: -1 if pipe.schedule == "zbv" else 1]
        known = pipe_ranks(names, tuple(blocks), (ranks,))
        assert any((counts == known.counts[first : first + ranks]).all() for first in known.first)
        assert known.held.tolist() == [*range(ranks, 0, -1)] * len(known.first)


@pytest.mark.parametrize(("name", "uneven"), [("dense", False), ("dense", True), ("sparse", True)])
def test_no_recipe_takes_less_than_the_floors_of_its_layout_and_pipeline(name: str, uneven: bool) -> None:
    """Whatever its schedule and sharding, and how blocks are shared out."""
    counted: CountedModel = MODELS[name]
    pricer = RecipePricer(counted, Cluster("h100_sxm", 2, 2))
    stages = {} if uneven else {"stage_blocks": (None,)}
    space = RecipeSpace(counted, 4, Recipe(global_batch=8), only={"micro_batch": (1, 4), **stages})
    for layout in itertools.chain.from_iterable(space.layouts()):
        ranks = list(space.pipelines(layout))
        first = space.recipe(layout, Keeping(), space.pipes(layout, ranks[0]).closed[0], Sharding())
        floors = pricer.layout_memory_floors(first, ranks[-1], KEEPINGS, uneven=uneven)
        assert floors.min() > 0
        for (floor, keeping), size in itertools.product(zip(floors, KEEPINGS, strict=True), ranks):
            pipes = itertools.chain.from_iterable(map(space.closed, itertools.chain(*space.pipes(layout, size))))
            for pipe, sharding in itertools.product(pipes, space.shardings(layout, size)):
                recipe = space.recipe(layout, keeping, pipe, sharding)
                assert floor <= pricer.pipeline_memory_floors([recipe], uneven=uneven)[0] <= pricer.memory_bytes(recipe)
