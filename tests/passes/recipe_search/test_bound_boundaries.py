"""Bounds over uneven stages lie below all that they bound, and are reached where nothing is left out."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations_with_replacement, pairwise
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard import Cluster, Recipe
from passes.recipe_search.bound_boundaries import Costs, StageLoads, stage_loads
from passes.recipe_search.known_pipes import Pipe, PipeSet
from passes.recipe_search.recipe_pricer import RecipePricer
from passes.recipe_search.recipe_space import RecipeSpace
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
def test_the_least_greatest_cost_and_who_is_within_another_are_those_of_trying_all_ways(
    ranks: int, data: st.DataObject
) -> None:
    """Costs drawn for each rank and load by two bounds, some infinite; by brute force over all boundaries."""
    blocks = tuple(data.draw(st.lists(st.sampled_from("ab"), min_size=max(1, ranks - 2), max_size=5)))
    loads = stage_loads(NAMES, blocks)
    values = st.sampled_from([0.0, 1.0, 2.5, 4.0, math.inf])
    begins, ends, own, turning = (
        np.array(data.draw(st.lists(values, min_size=size, max_size=size)))
        for size in [len(blocks) + 1] * 2 + [ranks * len(loads.counts)] * 2
    )
    costs = Costs(loads, begins, own.reshape(ranks, -1), turning.reshape(ranks, -1), ends)
    ways = {way: _greatest(costs, way) for way in _ways(loads, ranks, len(blocks))}
    assert costs.least()[0, 0] == min(ways.values())
    greatest = data.draw(st.sampled_from([0.0, 2.0, 4.0, 5.0]))
    some = {place for way, cost in ways.items() if cost <= greatest for place in way.places}
    assert set(np.nonzero(costs.within(greatest, costs.least()))[0].tolist()) == some


class _Way(NamedTuple):
    """A way to share blocks out: where stages begin and end, and their loads."""

    bounds: tuple[int, ...]
    places: tuple[int, ...]


def _ways(loads: StageLoads, ranks: int, blocks: int) -> list[_Way]:
    found = []
    for inner in combinations_with_replacement(range(blocks + 1), ranks - 1):
        bounds = (0, *inner, blocks)
        kinds = [0, *[1] * (ranks - 2), 2]
        places = tuple(int(loads.places[kind, *stage]) for kind, stage in zip(kinds, pairwise(bounds), strict=True))
        if min(places) >= 0:
            found.append(_Way(bounds, places))
    return found


def _greatest(costs: Costs, way: _Way) -> float:
    """The greatest cost of its ranks."""
    assert costs.turning is not None
    assert costs.ends is not None
    last, found = len(way.places) - 1, -math.inf
    for rank, (place, (begin, end)) in enumerate(zip(way.places, pairwise(way.bounds), strict=True)):
        own = costs.ranks[rank, place]
        if rank < last:
            own = max(own, costs.turning[rank, place] + costs.ends[end])
        found = max(found, float(own + (costs.begins[begin] if rank else 0.0)))
    return found


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
    assert pricer.memory_floors([recipe], PipeSet([start]))[0, 0] <= min(sizes.values())
    assert pricer.uneven_floor(recipe, start) <= min(times.values())
    limit = data.draw(st.sampled_from([*sizes.values(), math.inf]))
    fits = [pipe for pipe, size in sizes.items() if size <= limit]
    enough = data.draw(st.sampled_from([*times.values(), math.inf]))
    shardings = [recipe, *([replace(recipe, zero=1 - recipe.zero)] if recipe.zero < 2 else [])]
    fastest, smallest = (
        pricer.fastest_boundaries(
            recipe, data.draw(st.sampled_from([[recipe], shardings])), start, limit, enough=enough
        ),
        pricer.smallest_boundaries(recipe, start),
    )
    assert fastest.floor <= min(times[pipe] for pipe in fits)
    assert smallest.floor <= min(sizes.values())
    for pipe in priced:
        for stage, count in enumerate(pipe.stage_blocks):
            assert smallest.next_stage(pipe.stage_blocks[:stage])[count] <= sizes[pipe]
            if pipe in fits:
                assert fastest.next_stage(pipe.stage_blocks[:stage])[count] <= times[pipe]


@pytest.mark.parametrize("ranks", [2, 3])
def test_of_many_micro_batches_the_bound_is_all_work_shared_out(ranks: int) -> None:
    """Nine tenths of what one rank takes for all blocks, over the ranks, whatever their boundaries."""
    counted, recipe = (
        CountedModel((SPARSE.blocks[0],) * 4, SPARSE.tokens, SPARSE.count),
        Recipe(data=2, micro_batch=64, global_batch=128 * 96),
    )
    whole = RecipePricer(counted, Cluster("h100_sxm", 1, 2)).time_s(recipe)
    pricer = RecipePricer(counted, Cluster("h100_sxm", 1, 2 * ranks))
    floor = pricer.uneven_floor(replace(recipe, pipeline=ranks, schedule="1f1b"), Pipe(ranks, "1f1b", uneven=True))
    assert 0.9 * whole <= ranks * floor
