"""Bounds lie below what they bound."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard import Cluster, Recipe
from cost_models.power import power_limit
from cost_models.stages import StageTimes
from cost_models.step import fitted
from passes.recipe_search.bound_recipes import SectionFloors, rank_paths, step_floors
from passes.recipe_search.known_pipes import Pipe, known_pipes
from passes.recipe_search.pipe_shapes import pipe_shapes
from passes.recipes.pipeline_stages import cuts_backward, run_stages, share_out
from passes.sections.fold_program import AFTER, BEFORE
from tests.passes.pipes import recipe_of

NAMES = (BEFORE, "a", "b", AFTER)
SECONDS = st.integers(0, 16).map(lambda number: number / 8)


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Pipe, list[str], int]:
    """A pipeline, blocks of two kinds, micro-batches."""
    ranks, micro_batches = draw(st.integers(2, 4)), draw(st.integers(1, 24))
    blocks = draw(st.lists(st.sampled_from(["a", "b"]), min_size=ranks, max_size=9))
    pipe = draw(st.sampled_from(known_pipes(ranks, micro_batches, len(blocks))))
    if pipe.is_open:
        cuts = sorted(draw(st.lists(st.integers(0, len(blocks)), min_size=ranks - 1, max_size=ranks - 1)))
        pipe = pipe._replace(stage_blocks=tuple(np.diff([0, *cuts, len(blocks)]).tolist()))
    return pipe, blocks, micro_batches


@settings(max_examples=500)
@given(pipelines(), st.lists(SECONDS, min_size=13, max_size=13), st.booleans())
def test_no_pipeline_is_shorter_than_the_path_of_a_rank(
    drawn: tuple[Pipe, list[str], int], seconds: list[float], overlaps: bool
) -> None:
    """Whatever the schedule, its sections and its hand-overs take; 1F1B of equal stages takes just that."""
    pipe, blocks, micro_batches = drawn
    forward, backward, cutting = (np.array(seconds[begin : begin + 4]) for begin in (0, 4, 8))
    send_s = seconds[12]
    zeros = np.zeros(4)
    floors = SectionFloors(forward, backward, zeros, zeros, backward / 2, cutting, *[zeros] * 5, gain_rate=0.0)
    shapes = pipe_shapes(NAMES, tuple(blocks), (pipe,))
    found = rank_paths(floors, shapes, micro_batches, send_s, overlaps=overlaps).floor(np.zeros(1))[0]
    recipe = replace(recipe_of(pipe, micro_batches), overlap_pipeline=overlaps)
    stages = []
    for stage in share_out(blocks, recipe):
        counts = np.array([dict(stage.sections).get(name, 0) for name in NAMES])
        whole = float(counts @ backward)
        more = float(counts @ cutting) if cuts_backward(recipe) else 0.0
        stages.append(StageTimes(float(counts @ forward), whole / 2, whole / 2 + more, send_s))
    total_s, _, _ = run_stages(stages, recipe)
    assert found <= total_s * (1 + 1e-9) + 1e-12


def test_a_pipeline_of_equal_stages_takes_the_path_of_its_last_rank() -> None:
    """Three stages of 1 + 2 seconds and six micro-batches: 1F1B takes (3 - 1 + 6) times 3 seconds."""
    forward, zeros = np.array([0.0, 1, 0]), np.zeros(3)
    floors = SectionFloors(forward, 2 * forward, zeros, zeros, forward, *[zeros] * 6, gain_rate=0.0)
    shapes = pipe_shapes((BEFORE, "a", AFTER), ("a",) * 3, (Pipe(3, "1f1b"), Pipe(3, "zero-bubble")))
    paths = rank_paths(floors, shapes, 6, 0.0, overlaps=True)
    assert paths.floor(np.zeros(1)).tolist() == [24.0, 20.0]


@given(st.floats(0.01, 5), st.floats(0, 1), st.floats(0, 3), st.booleans())
def test_no_price_is_below_the_floor_at_any_clock(bound: float, share: float, more: float, knows_rate: bool) -> None:
    """The step takes `more` than its bound, of which products are a part; it runs at the clock that its time leaves.

    With products everywhere the same part of a step, the floor of a step at its bound is its price.
    """
    cluster = Cluster("h100_sxm", 1, 1)
    products = share * bound
    rate = share if knows_rate else 1.0
    floor = float(step_floors(lambda gain: bound - gain * products, products, cluster, fitted(), rate)[0])
    first = bound + more
    speed = power_limit().speed(products / first)
    assert floor <= first - (1 - 1 / speed) * products
    if more == 0:
        tolerance = 1e-8 if knows_rate else 0.02
        assert floor == pytest.approx(first - (1 - 1 / speed) * products, rel=tolerance)


def test_a_fuller_first_rank_waits_for_the_way_of_the_first_and_the_last_micro_batch() -> None:
    """Two stages of 1 + 2 seconds, the first with 0.2 more, six micro-batches: 2 (1 + 1) + 5 times 3.2, of 20.1."""
    forward, zeros = np.array([0.1, 1, 0]), np.zeros(3)
    late = np.array([0.0, 1, 0])
    floors = SectionFloors(forward, forward + late, zeros, zeros, late, *[zeros] * 6, gain_rate=0.0)
    shapes = pipe_shapes((BEFORE, "a", AFTER), ("a",) * 2, (Pipe(2, "zero-bubble"),))
    found = rank_paths(floors, shapes, 6, 0.0, overlaps=True).seconds[0]
    stages = [StageTimes(1.1, 1.1, 1.0), StageTimes(1.0, 1.0, 1.0)]
    total_s, _, _ = run_stages(stages, Recipe(pipeline=2, schedule="zero-bubble", global_batch=6))
    assert found.tolist() == pytest.approx([20.0, 19.1])
    assert total_s == pytest.approx(20.1)
