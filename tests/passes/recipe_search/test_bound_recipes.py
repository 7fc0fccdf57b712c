"""Bounds lie below what they bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard import Cluster, Runtime
from autoshard.ir.execution import Execution
from cost_models.stages import StageTimes
from passes.recipe_search.bound_recipes import SectionFloors, path_floors
from passes.recipe_search.known_pipes import Pipe, PipeSet, known_pipes
from passes.recipe_search.pipe_shapes import Floats, pipe_shapes
from passes.recipe_search.recipe_pricer import RecipePricer
from passes.recipes.pipeline_stages import cuts_backward, run_stages, share_out
from passes.recipes.price_ends import EndWork
from passes.sections.fold_program import AFTER, BEFORE
from tests.passes.decoders import priced_dense, priced_sparse
from tests.passes.executions import under
from tests.passes.pipes import recipe_of, stage_layers_of

NAMES = (BEFORE, "a", "b", AFTER)
SECONDS = st.integers(0, 16).map(lambda number: number / 8)
MODELS = {"dense": priced_dense().counted, "sparse": priced_sparse().counted}


def paths_of(
    forward: Floats, backward: Floats, pipes: Sequence[Pipe], blocks: Sequence[str], recipe: Execution, send_s: float
) -> list[float]:
    """Bounds on pipelines, of whose backwards half are gradients of weights, and which have no ends."""
    zeros = np.zeros(4)
    floors = SectionFloors(forward, backward, backward / 2, *[zeros] * 3)
    shapes = pipe_shapes(NAMES, tuple(blocks), tuple(pipes))
    nothing = [EndWork(0.0, 0.0, 0.0)]
    return path_floors(floors, shapes, send_s, recipe, lambda *_: nothing).tolist()


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Pipe, list[str], int]:
    """A pipeline, blocks of two kinds, micro-batches."""
    ranks, micro_batches = draw(st.integers(2, 4)), draw(st.integers(1, 24))
    blocks = draw(st.lists(st.sampled_from(["a", "b"]), min_size=ranks, max_size=9))
    return draw(st.sampled_from(known_pipes(ranks, micro_batches, len(blocks)))), blocks, micro_batches


@settings(max_examples=500)
@given(pipelines(), st.lists(SECONDS, min_size=13, max_size=13), st.booleans())
def test_no_pipeline_is_shorter_than_the_path_of_a_rank(
    drawn: tuple[Pipe, list[str], int], seconds: list[float], overlaps: bool
) -> None:
    """Any schedule takes at least its bound, with any times of sections and hand-overs."""
    pipe, blocks, micro_batches = drawn
    forward, backward, cutting = (np.array(seconds[begin : begin + 4]) for begin in (0, 4, 8))
    recipe = under(recipe_of(pipe, len(blocks), micro_batches), overlap_pipeline=overlaps)
    (found,) = paths_of(forward, backward, [pipe], blocks, recipe, seconds[12])
    stages = []
    for stage in share_out(blocks, recipe):
        counts = np.array([dict(stage.sections).get(name, 0) for name in NAMES])
        whole = float(counts @ backward)
        more = float(counts @ cutting) if cuts_backward(recipe) else 0.0
        stages.append(StageTimes(float(counts @ forward), whole / 2, whole / 2 + more, seconds[12]))
    total_s, _ = run_stages(stages, recipe)
    assert found <= total_s * (1 + 1e-9) + 1e-12


def test_a_pipeline_of_equal_stages_takes_the_path_of_its_last_rank() -> None:
    """Three stages of 1 + 2 seconds and six micro-batches: 1F1B takes (3 - 1 + 6) times 3 seconds."""
    forward = np.array([0.0, 1, 0, 0])
    recipe = Execution(pipeline=3, schedule="1F1B", global_batch=6)
    pipes = (Pipe(3, "1F1B"), Pipe(3, "InterleavedZeroBubble"))
    assert paths_of(forward, 2 * forward, pipes, "aaa", recipe, 0.0) == pytest.approx([24.0, 20.0])


def pricer_of(name: str) -> RecipePricer:
    """The pricer of a model's recipes, which differ in searched fields only."""
    return RecipePricer(MODELS[name], Cluster("h100_sxm", 2, 4))


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
@given(RECIPES)
def test_no_step_is_shorter_than_its_mean_beside_what_it_exchanges(name: str, recipe: Execution) -> None:
    """And that mean is no less than the mean of its layout."""
    pricer = pricer_of(name)
    layout = pricer.layout_floor(replace(recipe, zero=0, zero_group=None), 8)
    (floor,) = pricer.mean_floors([recipe])
    assert layout <= floor * (1 + 1e-12)
    assert floor <= pricer.time_s(recipe)


@pytest.mark.parametrize("name", list(MODELS))
@settings(max_examples=25)
@given(RECIPES, st.sampled_from([2, 4]), st.data())
def test_no_step_with_a_pipeline_is_shorter_than_its_floors(
    name: str, drawn: Execution, ranks: int, data: st.DataObject
) -> None:
    """The mean of its ranks, and the path and the ends of one, alone or beside other shardings."""
    recipe = replace(drawn, data=8 // ranks, zero_group=None, pipeline=ranks, schedule="1F1B")
    pricer = pricer_of(name)
    pipe = data.draw(st.sampled_from(known_pipes(ranks, recipe.micro_batches, len(pricer.counted.blocks))))
    time_s = pricer.time_s(replace(recipe, **fields_of(pipe, len(pricer.counted.blocks))))
    (mean,), (path,) = pricer.mean_floors([recipe]), pricer.recipe_floors([recipe], pipe)
    assert max(mean, path) <= time_s
    assert pricer.path_floors([recipe], PipeSet([pipe]))[0] == path


def fields_of(pipe: Pipe, blocks: int) -> dict[str, object]:
    """Fields of a recipe that describe its pipeline."""
    return {
        "schedule": pipe.schedule,
        "virtual_stages": pipe.virtual_stages,
        "stage_layers": stage_layers_of(pipe, blocks),
    }


def test_recipes_that_are_bounded_at_once_have_the_bounds_of_each_alone() -> None:
    """In time and in memory, whatever they exchange."""
    pricer = pricer_of("dense")
    recipes = [Execution(data=8, zero=zero, zero_group=2, global_batch=64) for zero in (1, 2, 3)]
    recipes.append(Execution(data=8, global_batch=64))
    alone = [pricer.mean_floors([each])[0] for each in recipes]
    assert pricer.mean_floors(recipes).tolist() == pytest.approx(alone, rel=1e-12)
    pipes = PipeSet([Pipe()])
    at_once = pricer.memory_floors(recipes, pipes)
    assert at_once.tolist() == [pricer.memory_floors([each], pipes)[0].tolist() for each in recipes]
