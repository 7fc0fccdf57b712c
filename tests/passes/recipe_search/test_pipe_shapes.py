"""Pipelines of a size have their sections where their recipes have them."""

from __future__ import annotations

from collections import Counter
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from cost_models.schedule_orders import admits
from passes.recipe_search.known_pipes import Pipe, known_pipes, schedules
from passes.recipe_search.pipe_shapes import held_by, pipe_shapes
from passes.recipes.pipeline_stages import cuts_backward, in_flight, rank_sections, share_out
from passes.sections.fold_program import AFTER, BEFORE
from tests.passes.pipes import recipe_of

NAMES = (BEFORE, "a", "b", AFTER)


@given(st.integers(2, 4), st.integers(1, 24), st.lists(st.sampled_from(["a", "b"]), min_size=2, max_size=12))
def test_pipelines_of_a_size_have_their_sections_where_their_recipes_have_them(
    ranks: int, micro_batches: int, blocks: list[str]
) -> None:
    """On each rank, and before its first stage."""
    pipes = known_pipes(ranks, micro_batches, len(blocks))
    shapes = pipe_shapes(NAMES, tuple(blocks), pipes) if pipes else None
    for place, pipe in enumerate(pipes):
        assert shapes is not None
        recipe = recipe_of(pipe, len(blocks), micro_batches)
        stages = share_out(blocks, recipe)
        assert [dict(zip(NAMES, row, strict=True)) for row in shapes.counts[place].tolist()] == [
            {name: counts.get(name, 0) for name in NAMES} for counts in rank_sections(stages, recipe)
        ]
        passed = [Counter[str]()]
        for stage in stages:
            passed.append(passed[-1] + Counter(dict(stage.sections)))
        assert shapes.before[place].tolist() == [[before[name] for name in NAMES] for before in passed[:ranks]]
        assert shapes.is_whole[place, 0] == (not cuts_backward(recipe))
        assert held_by((pipe,), micro_batches)[0].tolist() == list(in_flight(recipe))


@given(st.integers(2, 6), st.integers(1, 40), st.integers(1, 24))
def test_the_pipelines_of_a_size_are_those_that_its_schedules_admit(
    ranks: int, micro_batches: int, blocks: int
) -> None:
    """Each schedule with every number of virtual stages that the blocks suffice for."""
    found = known_pipes(ranks, micro_batches, blocks)
    for split_ends, (schedule, virtual) in product((False, True), schedules(blocks + 2)):
        pipe = Pipe(ranks, schedule, virtual, split_ends)
        is_known = ranks * virtual <= blocks + 2 * split_ends
        assert (pipe in found) == (is_known and admits(schedule, ranks, micro_batches, virtual))
