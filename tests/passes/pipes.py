"""Recipes of pipelines of a space."""

from __future__ import annotations

from autoshard.ir.execution import Execution
from passes.recipe_search.known_pipes import Pipe
from passes.recipes.pipeline_stages import even_blocks


def recipe_of(pipe: Pipe, blocks: int, micro_batches: int) -> Execution:
    """A recipe of a pipeline, of so many blocks and micro-batches."""
    return Execution(
        pipeline=pipe.pipeline, schedule=pipe.schedule, virtual_stages=pipe.virtual_stages,
        stage_layers=stage_layers_of(pipe, blocks), global_batch=micro_batches,
    )  # fmt: skip


def stage_layers_of(pipe: Pipe, blocks: int) -> tuple[int, ...] | None:
    """Blocks on each stage, where they are not as even as can be."""
    if not pipe.split_ends:
        return None
    return even_blocks(blocks, pipe.pipeline * pipe.virtual_stages, split_ends=True)
