"""Pipelines that recipes may have, each under one name."""

from __future__ import annotations

import pytest

from cost_models.schedule_orders import admits
from passes.recipe_search.known_pipes import (
    Pipe,
    even_ways,
    known_pipes,
    may_be_uneven,
    schedule_of,
)


def _stages(pipe: Pipe, blocks: int) -> tuple[int, ...]:
    """The blocks of each stage, even or not."""
    ways = even_ways(blocks, pipe.pipeline * pipe.virtual_stages)
    return pipe.stage_blocks if pipe.uneven else ways[-1 if pipe.split_ends else 0]


@pytest.mark.parametrize(("blocks", "ranks"), [(1, 2), (4, 2), (4, 4), (6, 4)])
def test_even_pipelines_are_listed_once(blocks: int, ranks: int) -> None:
    """Ends may count as blocks, and alone be empty; schedules that need more micro-batches are left out."""
    found = known_pipes(ranks, 2 * ranks, blocks)
    assert len(set(found)) == len(found)
    assert {pipe.pipeline for pipe in found} == {ranks}
    even = [pipe for pipe in found if not pipe.uneven]
    assert {"gpipe", "1f1b", "zero-bubble"} <= {pipe.schedule for pipe in even}
    for pipe in even:
        stages = ranks * pipe.virtual_stages
        assert stages <= blocks + 2 * pipe.split_ends
        counts = _stages(pipe, blocks)
        assert sum(counts) == blocks
        assert all(counts[1:-1])
    assert any(pipe.uneven for pipe in found) is may_be_uneven(blocks, ranks)
    assert all(pipe.is_open for pipe in found.open)
    assert sorted((*found.open, *found.closed)) == sorted(found)
    for micro_batches in (1, 3):
        fewer = known_pipes(ranks, micro_batches, blocks)
        assert set(fewer) == {
            pipe for pipe in found if admits(schedule_of(pipe), ranks, micro_batches, pipe.virtual_stages)
        }


def test_one_rank_is_no_pipeline() -> None:
    """It has no schedule; and a model without blocks has no pipelines."""
    assert known_pipes(1, 8, 4) == (Pipe(),)
    assert not known_pipes(2, 8, 0)
