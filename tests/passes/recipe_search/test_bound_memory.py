"""Bounds on memory lie below what they bound."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard import Cluster
from autoshard.ir.execution import Execution
from passes.recipe_search.known_pipes import PipeSet
from passes.recipe_search.pipe_shapes import presence
from passes.recipe_search.recipe_pricer import RecipePricer
from passes.recipe_search.recipe_space import KEEPINGS, Keeping, RecipeSpace, Sharding
from passes.recipes.pipeline_stages import in_flight
from passes.recipes.price_memory import memory_price
from passes.sections.price_model import CountedModel
from tests.passes.decoders import priced_dense, priced_sparse
from tests.passes.executions import under

MODELS = {"dense": priced_dense().counted, "sparse": priced_sparse().counted}


@pytest.mark.parametrize("name", list(MODELS))
def test_no_recipe_takes_less_than_the_floors_of_its_layout_and_pipeline(name: str) -> None:
    """Any schedule and sharding take at least the floor of their layout; once these are known, bounds are the price."""
    counted: CountedModel = MODELS[name]
    pricer = RecipePricer(counted, Cluster("h100_sxm", 2, 2))
    base = under(Execution(global_batch=8), master_weights=True, gradient_dtype="bf16")
    space = RecipeSpace(counted, 4, base, offloads=True, only={"micro_batch": (1, 4)})
    decided_by = Counter[bool]()
    for layout in itertools.chain.from_iterable(space.layouts()):
        ranks = list(space.pipelines(layout))
        first = space.recipe(layout, Keeping(), space.pipes(layout, ranks[0])[0], Sharding())
        by_zero = [pricer.layout_memory_floors(first, ranks[-1], KEEPINGS, zero=zero) for zero in range(4)]
        assert np.all(np.diff(by_zero, axis=0) <= 0)
        assert by_zero[-1].min() > 0
        for (place, keeping), size in itertools.product(enumerate(KEEPINGS), ranks):
            for pipe, sharding in itertools.product(space.pipes(layout, size), space.shardings(layout, size)):
                recipe = space.recipe(layout, keeping, pipe, sharding)
                own = pricer.memory_floors([recipe], PipeSet([pipe]))[0, 0]
                price = memory_price(
                    pricer.sections(recipe), pricer.stages(recipe), recipe, pricer.groups(recipe), in_flight(recipe)
                )
                assert price.total * (1 - 2e-9) - 9 <= own <= price.total
                assert by_zero[sharding.zero][place] <= own * (1 + 1e-12)
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
