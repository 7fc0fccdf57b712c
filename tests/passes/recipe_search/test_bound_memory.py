"""Bounds on memory lie below what they bound."""

from __future__ import annotations

import itertools
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard import Cluster, Recipe
from cost_models.schedule_orders import most_in_flight
from passes.recipe_search.bound_memory import pipe_ranks
from passes.recipe_search.known_pipes import PipeSet, known_pipes, schedule_of
from passes.recipe_search.pipe_shapes import pipe_shapes, presence
from passes.recipe_search.recipe_pricer import RecipePricer
from passes.recipe_search.recipe_space import KEEPINGS, Keeping, RecipeSpace, Sharding
from passes.recipes.pipeline_stages import in_flight
from passes.recipes.price_memory import memory_price
from passes.sections.fold_program import AFTER, BEFORE
from passes.sections.price_model import CountedModel
from tests.passes.decoders import priced_dense, priced_sparse

MODELS = {"dense": priced_dense().counted, "sparse": priced_sparse().counted}


@given(st.integers(2, 9), st.integers(1, 40), st.data())
def test_a_rank_holds_a_micro_batch_for_itself_and_each_rank_behind_it(
    ranks: int, micro_batches: int, data: st.DataObject
) -> None:
    """Or all that there are, of each of its stages, whatever the schedule; under "zbv" ranks count from the last."""
    pipe = data.draw(st.sampled_from(known_pipes(ranks, micro_batches, 3 * ranks)))
    held = most_in_flight(schedule_of(pipe), ranks, micro_batches, pipe.virtual_stages)
    for behind, count in enumerate(held if pipe.schedule == "zbv" else reversed(held)):
        assert count >= min(behind + 1, micro_batches) * pipe.virtual_stages


@given(st.integers(1, 6), st.lists(st.sampled_from(["a", "b"]), min_size=1, max_size=15), st.data())
def test_no_rank_of_an_even_pipeline_needs_more_than_those_that_bound_memory(
    ranks: int, blocks: list[str], data: st.DataObject
) -> None:
    """They are some of its ranks, and one of them has and holds as much as each other one; "zbv" is reversed."""
    names = (BEFORE, "a", "b", AFTER)
    even = [pipe for pipe in known_pipes(ranks, 2 * ranks, len(blocks)) if not pipe.uneven]
    if even:
        pipe = data.draw(st.sampled_from(even))
        counts = pipe_shapes(names, tuple(blocks), (pipe,)).counts[0][:: -1 if pipe.schedule == "zbv" else 1]
        known = pipe_ranks(names, tuple(blocks), (ranks,))
        mine = [(count.tolist(), ranks - rank) for rank, count in enumerate(counts)]
        rows = list(zip(known.counts.tolist(), known.held.tolist(), strict=True))
        pipes = [rows[first:last] for first, last in pairwise([*known.first, len(rows)])]
        assert any(
            all(row in mine for row in pipe)
            and all(any(held >= own and (np.array(row) >= count).all() for row, held in pipe) for count, own in mine)
            for pipe in pipes
        )


@pytest.mark.parametrize(("name", "uneven"), [("dense", False), ("dense", True), ("sparse", True)])
def test_no_recipe_takes_less_than_the_floors_of_its_layout_and_pipeline(name: str, uneven: bool) -> None:
    """Whatever its schedule and sharding, and how blocks are shared out; once these are known, bounds are the price."""
    counted: CountedModel = MODELS[name]
    pricer = RecipePricer(counted, Cluster("h100_sxm", 2, 2))
    stages = {} if uneven else {"stage_blocks": (None,)}
    base = Recipe(global_batch=8, master_weights=True, gradient_dtype="bf16")
    space = RecipeSpace(counted, 4, base, offloads=True, only={"micro_batch": (1, 4), **stages})
    decided_by = Counter[bool]()
    for layout in itertools.chain.from_iterable(space.layouts()):
        ranks = list(space.pipelines(layout))
        first = space.recipe(layout, Keeping(), space.pipes(layout, ranks[0]).closed[0], Sharding())
        by_zero = [
            pricer.layout_memory_floors(first, ranks[-1], KEEPINGS, zero=zero, uneven=uneven) for zero in range(4)
        ]
        assert np.all(np.diff(by_zero, axis=0) <= 0)
        assert by_zero[-1].min() > 0
        for (place, keeping), size in itertools.product(enumerate(KEEPINGS), ranks):
            for known, sharding in itertools.product(space.pipes(layout, size), space.shardings(layout, size)):
                for pipe in space.closed(known):
                    recipe = space.recipe(layout, keeping, pipe, sharding)
                    of_set, own = (pricer.memory_floors([recipe], PipeSet([each]))[0, 0] for each in (known, pipe))
                    price = memory_price(
                        pricer.sections(recipe), pricer.stages(recipe), recipe, pricer.groups(recipe), in_flight(recipe)
                    )
                    assert price.total * (1 - 2e-9) - 9 <= own <= price.total
                    assert by_zero[sharding.zero][place] <= of_set * (1 + 1e-12) <= own * (1 + 2e-12)
                    decided_by["update" in price.parts] += 1
    assert min(decided_by[True], decided_by[False]) > 0


@given(st.lists(st.lists(st.integers(0, 2), min_size=3, max_size=3), min_size=1, max_size=8), st.data())
def test_the_largest_of_the_sections_that_ranks_have(counts: list[list[int]], data: st.DataObject) -> None:
    """0 where there is none; of several values at once as of each."""
    values = np.array(data.draw(st.lists(st.lists(st.integers(0, 9), min_size=2, max_size=2), min_size=3, max_size=3)))
    present = presence(np.array(counts, dtype=float))
    both = present.largest(values.astype(float))
    for rank, row in enumerate(counts):
        has = [value for value, count in zip(values.tolist(), row, strict=True) if count]
        assert both[rank].tolist() == [max((value[each] for value in has), default=0) for each in range(2)]
    assert both[:, 1].tolist() == present.largest(values[:, 1].astype(float)).tolist()
