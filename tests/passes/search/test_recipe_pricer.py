"""Lower bounds of a recipe's time and memory are at most its price."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard import Cluster, Runtime
from autoshard.ir.execution import Execution
from cost_models.order_times import StageTimes
from passes.search.layers.fold_program import AFTER, BEFORE
from passes.search.pipeline_stages import cut_into_stages, cuts_backward, stages_time
from passes.search.price_recipe import LayerTimes
from passes.search.recipe_pricer import RecipePricer, path_times, places_of
from passes.search.recipe_space import POLICIES, ActivationPolicy, Pipe, RecipeSpace, Sharding, known_pipes
from tests.passes.decoders import priced_dense, priced_sparse
from tests.passes.executions import under
from tests.passes.pipes import recipe_of

NAMES = (BEFORE, "a", "b", AFTER)
SECONDS = st.integers(0, 16).map(lambda number: number / 8)
MODELS = {"dense": priced_dense, "sparse": priced_sparse}


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Pipe, list[str], int]:
    """Draw a pipeline, blocks of two kinds, and a number of micro-batches."""
    ranks, micro_batches = draw(st.integers(2, 4)), draw(st.integers(1, 24))
    blocks = draw(st.lists(st.sampled_from(["a", "b"]), min_size=ranks, max_size=9))
    known = known_pipes(ranks, micro_batches, len(blocks), every=True)
    return draw(st.sampled_from(known)), blocks, micro_batches


@settings(max_examples=500)
@given(pipelines(), st.lists(SECONDS, min_size=9, max_size=9))
def test_no_pipeline_is_shorter_than_the_path_of_a_rank(
    drawn: tuple[Pipe, list[str], int], seconds: list[float]
) -> None:
    """With drawn times of layers and sends, any schedule takes at least the bound by one rank's path."""
    pipe, blocks, micro_batches = drawn
    forward, backward, send_s = np.array(seconds[:4]), np.array(seconds[4:8]), seconds[8]
    times = LayerTimes(forward, backward, *[np.zeros(4)] * 5, communication=())
    (found,) = path_times(times, places_of(NAMES, tuple(blocks), (pipe,)), send_s, micro_batches)
    recipe, stages = recipe_of(pipe, len(blocks), micro_batches), []
    for stage in cut_into_stages(blocks, recipe):
        counts = np.array([dict(stage.layers).get(name, 0) for name in NAMES])
        half = float(counts @ backward) / 2
        stages.append(StageTimes(float(counts @ forward), half, half, send_s))
    total_s = stages_time(stages, recipe)
    assert found <= total_s * (1 + 1e-9) + 1e-12
    if len(set(stages)) == 1 and not cuts_backward(recipe) and pipe.virtual_stages == 1 and not send_s:
        assert found == pytest.approx(total_s)


RECIPES = st.builds(
    Execution,
    data=st.just(8),
    zero=st.integers(0, 3),
    zero_group=st.sampled_from([None, 2, 4]),
    micro_batch=st.sampled_from([1, 16]),
    global_batch=st.sampled_from([128, 256]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    offload=st.sampled_from(["none", "activations"]),
    runtime=st.builds(
        Runtime,
        name=st.just("mine"),
        cuda_graph=st.booleans(),
        gradient_dtype=st.sampled_from(["f32", "bf16"]),
        overlap_gradients=st.booleans(),
        overlap_parameters=st.booleans(),
    ),
)


@pytest.mark.parametrize("name", list(MODELS))
@settings(max_examples=40)
@given(RECIPES, st.sampled_from([1, 2, 4]), st.data())
def test_no_step_is_shorter_than_its_floors(name: str, drawn: Execution, ranks: int, data: st.DataObject) -> None:
    """A step takes at least the mean over its ranks, and at least one rank's path.

    The mean without sharding is at most the mean with sharding.
    """
    pricer = RecipePricer(MODELS[name]().counted, Cluster("h100_sxm", 2, 4))
    group = drawn.zero_group if ranks == 1 else None
    recipe = replace(drawn, data=8 // ranks, zero_group=group, pipeline=ranks, schedule="1F1B" if ranks > 1 else None)
    blocks = len(pricer.counted.blocks)
    pipe = data.draw(st.sampled_from(known_pipes(ranks, recipe.micro_batches, blocks)))
    fields = {"schedule": pipe.schedule, "virtual_stages": pipe.virtual_stages}
    time_s = pricer.time_s(replace(recipe, **fields, stage_layers=pipe.stage_layers(blocks)))
    plain = pricer.least_time(replace(recipe, zero=0, zero_group=None))
    assert plain <= pricer.least_time(recipe) * (1 + 1e-12)
    assert max(pricer.least_time(recipe), pricer.least_times(recipe, (pipe,))[0]) <= time_s


@pytest.mark.parametrize("name", list(MODELS))
def test_no_recipe_takes_less_memory_than_the_floors_of_its_layout_and_pipeline(name: str) -> None:
    """A layout's memory floor is at most each recipe's own floor, which is the price or up to ten bytes less."""
    counted = MODELS[name]().counted
    pricer = RecipePricer(counted, Cluster("h100_sxm", 2, 2))
    base = under(Execution(global_batch=8), master_weights=True, gradient_dtype="bf16")
    space = RecipeSpace(counted, 4, base, offloads=True, only={"micro_batch": (1, 4)})
    decided_by = Counter[bool]()
    for layout in itertools.chain.from_iterable(space.layouts()):
        ranks = list(space.pipelines(layout))
        for policy, size in itertools.product(POLICIES, ranks):
            most = Pipe(ranks[-1], "1F1B") if ranks[-1] > 1 else Pipe()
            floors = [pricer.least_memory(space.recipe(layout, policy, most, Sharding(zero))) for zero in range(4)]
            assert floors == sorted(floors, reverse=True)
            for pipe, sharding in itertools.product(space.pipes(layout, size), space.shardings(layout, size)):
                recipe = space.recipe(layout, policy, pipe, sharding)
                own, price = pricer.memory_floors(recipe, (pipe,))[0], pricer.memory_bytes(recipe)
                assert price - 10 <= own <= price
                assert floors[sharding.zero] <= own * (1 + 1e-12)
                decided_by[policy == ActivationPolicy()] += 1
    assert min(decided_by[True], decided_by[False]) > 0
