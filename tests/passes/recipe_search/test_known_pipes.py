"""Pipelines that recipes may have, each under one name."""

from __future__ import annotations

import pytest

from cost_models.schedule_orders import admits
from passes.recipe_search.known_pipes import (
    Pipe,
    known_pipes,
)
from passes.recipes.pipeline_stages import even_blocks


def _stages(pipe: Pipe, blocks: int) -> tuple[int, ...]:
    """The blocks of each stage."""
    return even_blocks(blocks, pipe.pipeline * pipe.virtual_stages, split_ends=pipe.split_ends)


@pytest.mark.parametrize(("blocks", "ranks"), [(1, 2), (4, 2), (4, 4), (6, 4)])
def test_pipelines_are_listed_once(blocks: int, ranks: int) -> None:
    """Ends may count as blocks, and alone be empty; schedules that need more micro-batches are left out."""
    found = known_pipes(ranks, 2 * ranks, blocks)
    assert len(set(found)) == len(found)
    assert {pipe.pipeline for pipe in found} == {ranks}
    assert {"GPipe", "1F1B", "InterleavedZeroBubble"} <= {pipe.schedule for pipe in found}
    for pipe in found:
        stages = ranks * pipe.virtual_stages
        assert stages <= blocks + 2 * pipe.split_ends
        counts = _stages(pipe, blocks)
        assert sum(counts) == blocks
        assert all(counts[1:-1])
    for micro_batches in (1, 3):
        fewer = known_pipes(ranks, micro_batches, blocks)
        assert set(fewer) == {
            pipe for pipe in found if admits(pipe.chosen_schedule, ranks, micro_batches, pipe.virtual_stages)
        }


def test_one_rank_is_no_pipeline() -> None:
    """It has no schedule; and a model without blocks has no pipelines."""
    assert known_pipes(1, 8, 4) == (Pipe(),)
    assert not known_pipes(2, 8, 0)
