"""Bounds over uneven stages lie below all that they bound, and are reached where nothing is left out."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard import Cluster, Recipe
from passes.recipe_search.bound_boundaries import Costs, StageLoads, stage_loads
from passes.recipe_search.recipe_pricer import RecipePricer
from passes.recipe_search.recipe_space import Pipe, RecipeSpace
from passes.sections.fold_program import AFTER, BEFORE
from passes.sections.price_model import CountedModel
from tests.passes.decoders import priced_sparse

NAMES = (BEFORE, "a", "b", AFTER)
SPARSE = priced_sparse().counted


def test_stages_have_blocks_that_follow_each_other_and_the_ends() -> None:
    """Of "a", "b", "a": a middle stage may have the first two, never none; the first and the last may have none."""
    loads = stage_loads(NAMES, ("a", "b", "a"))
    assert loads.counts[loads.places[1, 0, 2]].tolist() == [0, 1, 1, 0]
    assert loads.counts[loads.places[0, 0, 0]].tolist() == [1, 0, 0, 0]
    assert loads.counts[loads.places[2, 3, 3]].tolist() == [0, 0, 0, 1]
    assert [loads.places[1, 1, 1], loads.places[0, 1, 2], loads.places[2, 0, 2]] == [-1, -1, -1]
    assert loads.before[2].tolist() == [1, 1, 1, 0]


@given(st.integers(2, 4), st.data())
def test_the_least_greatest_cost_is_that_of_trying_all_ways(ranks: int, data: st.DataObject) -> None:
    """Costs drawn for each rank and load, some infinite; by brute force over all boundaries."""
    blocks = tuple(data.draw(st.lists(st.sampled_from("ab"), min_size=max(1, ranks - 2), max_size=5)))
    loads = stage_loads(NAMES, blocks)
    values = st.sampled_from([0.0, 1.0, 2.5, 4.0, math.inf])
    begins, own = (
        np.array(data.draw(st.lists(values, min_size=size, max_size=size)))
        for size in (len(blocks) + 1, ranks * len(loads.counts))
    )
    costs = Costs(loads, begins, own.reshape(ranks, -1))
    assert costs.least()[0, 0] == _least_by_trying(costs, loads, ranks, len(blocks))


def _least_by_trying(costs: Costs, loads: StageLoads, ranks: int, blocks: int) -> float:
    def least(rank: int, begin: int) -> float:
        kind = 0 if rank == 0 else 2 if rank == ranks - 1 else 1
        found = math.inf
        for end in range(begin, blocks + 1):
            place = loads.places[kind, begin, end]
            if place >= 0:
                own = costs.ranks[rank, place] + (costs.begins[begin] if rank else 0.0)
                found = min(found, max(own, least(rank + 1, end) if rank < ranks - 1 else -math.inf))
        return found

    return least(0, 0)


RECIPES = st.builds(
    Recipe,
    data=st.just(2),
    zero=st.integers(0, 3),
    micro_batch=st.sampled_from([1, 64]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    cuda_graph=st.booleans(),
    overlap_pipeline=st.booleans(),
    overlap_gradients=st.booleans(),
    overlap_parameters=st.booleans(),
)


@pytest.mark.parametrize("ranks", [2, 3])
@settings(max_examples=8)
@given(RECIPES, st.sampled_from([1, 2, 4]), st.sampled_from(["gpipe", "1f1b", "zero-bubble"]), st.data())
def test_no_way_to_share_blocks_out_is_below_its_bounds(
    ranks: int, drawn: Recipe, rounds: int, schedule: str, data: st.DataObject
) -> None:
    """Neither in time nor in memory, whatever the first stages have; on a device whose clock follows its power."""
    blocks = data.draw(st.lists(st.sampled_from(sorted(set(SPARSE.blocks))), min_size=ranks, max_size=5))
    counted = CountedModel(tuple(blocks), SPARSE.tokens, SPARSE.count, has_experts=True)
    batch = drawn.micro_batch * drawn.data * ranks * rounds
    recipe = replace(drawn, pipeline=ranks, schedule=schedule, global_batch=batch)
    pricer = RecipePricer(counted, Cluster("h100_sxm", 1, 2 * ranks))
    space = RecipeSpace(counted, 2 * ranks, Recipe(global_batch=batch))
    start = Pipe(ranks, schedule, uneven=True)
    priced = {pipe: replace(recipe, stage_blocks=pipe.stage_blocks) for pipe in space.closed(start)}
    times = {pipe: pricer.time_s(each) for pipe, each in priced.items()}
    sizes = {pipe: pricer.memory_bytes(each) for pipe, each in priced.items()}
    assert pricer.pipeline_memory_floors([recipe], uneven=True)[0] <= min(sizes.values())
    assert pricer.uneven_memory_floor(recipe, start) <= min(sizes.values())
    assert pricer.uneven_floor(recipe, start) <= min(times.values())
    limit = data.draw(st.sampled_from([*sizes.values(), math.inf]))
    fits = [pipe for pipe, size in sizes.items() if size <= limit]
    enough = data.draw(st.sampled_from([*times.values(), math.inf]))
    before_ends = pricer.fastest_boundaries(recipe, start, limit, has_ends=False, enough=enough).floor
    fastest, smallest = (
        pricer.fastest_boundaries(recipe, start, limit, has_ends=True, enough=enough),
        pricer.smallest_boundaries(recipe, start),
    )
    assert before_ends <= fastest.floor <= min(times[pipe] for pipe in fits)
    assert smallest.floor <= min(sizes.values())
    for pipe in priced:
        for stage, count in enumerate(pipe.stage_blocks):
            assert smallest.next_stage(pipe.stage_blocks[:stage])[count] <= sizes[pipe]
            if pipe in fits:
                assert fastest.next_stage(pipe.stage_blocks[:stage])[count] <= times[pipe]
