"""Bounds on what ranks take lie below it, however shards are exchanged and blocks shared out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations_with_replacement, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard import Cluster, Recipe
from passes.recipe_search.bound_boundaries import whole_turns
from passes.recipe_search.bound_ranks import exchanging, whole_blocks
from passes.recipe_search.known_pipes import Pipe, PipeSet, known_pipes
from passes.recipe_search.pipe_shapes import Floats, pipe_shapes
from passes.recipe_search.recipe_pricer import Kind, RecipePricer
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
    whole = whole_blocks(NAMES, alike, pipe.pipeline)
    assert whole.floor(np.array(seconds)) == min(way.max() for way in ways)
    assert (whole.with_end.min(), whole.with_end.max()) == (0, len(alike))


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
    alone, exchanges = pricer.section_floors(recipe, gathers=False), pricer.exchanges(recipe, (recipe.zero_group,))
    bounds = exchanging([alone], [exchanges], recipe, pricer.model).at(np.zeros(1))[0]
    assert (bounds <= pricer.section_floors(recipe).work * (1 + 1e-12)).all()
    assert floor_of(pricer, [(recipe, (recipe.zero_group,))])[0] <= pricer.time_s(recipe)
    of_any_group = floor_of(pricer, [(recipe, (None, 2, 4))])[0]
    assert all(of_any_group <= pricer.time_s(replace(recipe, zero_group=group)) for group in (None, 2, 4))


def floor_of(pricer: RecipePricer, kinds: Sequence[Kind]) -> Floats:
    """Bounds on the steps of recipes without a pipeline, from the mean of ranks."""
    return pricer.mean_floors(kinds, PipeSet([Pipe()]), np.ones((len(kinds), 1), dtype=bool))


@pytest.mark.parametrize("name", list(MODELS))
@settings(max_examples=25)
@given(RECIPES, st.sampled_from([2, 4]), st.data())
def test_no_step_is_shorter_than_the_mean_of_ranks_under_the_schedules_that_fit(
    name: str, drawn: Recipe, ranks: int, data: st.DataObject
) -> None:
    """Where these leave ranks idle, however blocks are shared out, so much longer."""
    recipe = replace(drawn, data=8 // ranks, zero_group=None, pipeline=ranks, schedule="1f1b")
    pricer = pricer_of(name)
    pipes = known_pipes(ranks, recipe.micro_batches, len(pricer.counted.blocks)).closed
    fitting = data.draw(st.sets(st.sampled_from(pipes), min_size=1, max_size=4))
    (floor,) = pricer.mean_floors([(recipe, (None,))], pipes, np.array([[pipe in fitting for pipe in pipes]]))
    times = [pricer.time_s(replace(recipe, **fields_of(pipe))) for pipe in fitting]
    assert floor <= min(times)
    (least,) = pricer.mean_floors([(recipe, (None,))], pipes, np.ones((1, len(pipes)), dtype=bool))
    assert least <= floor


def fields_of(pipe: Pipe) -> dict[str, object]:
    """What a recipe says of its pipeline."""
    return {"schedule": pipe.schedule, "virtual_stages": pipe.virtual_stages, "split_ends": pipe.split_ends}


def test_ranks_with_one_stage_wait_for_each_other_as_long_as_stages_that_are_alike_make_them() -> None:
    """P - 1 micro-batches, where forwards and backwards take turns and there are more micro-batches than ranks."""
    for ranks, micro_batches in product((1, 2, 3, 5, 8), (9, 16, 64)):
        turns = whole_turns(ranks, micro_batches, alternates=True)
        assert turns == pytest.approx((micro_batches + ranks - 1) / ranks, rel=1e-9)


def test_recipes_that_are_bounded_at_once_have_the_bounds_of_each_alone() -> None:
    """In time and in memory, whatever they exchange."""
    pricer = pricer_of("dense")
    recipes = [Recipe(data=8, zero=zero, zero_group=2, global_batch=64) for zero in (1, 2, 3)]
    recipes.append(Recipe(data=8, global_batch=64))
    kinds = [(recipe, (recipe.zero_group,)) for recipe in recipes]
    assert floor_of(pricer, kinds).tolist() == [floor_of(pricer, [each])[0] for each in kinds]
    pipes = PipeSet([Pipe()])
    at_once = pricer.memory_floors(recipes, pipes)
    assert at_once.tolist() == [pricer.memory_floors([each], pipes)[0].tolist() for each in recipes]
