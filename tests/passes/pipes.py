"""Turn a pipeline of the recipe space into a recipe."""

from __future__ import annotations

from dataclasses import replace

from autoshard.ir.execution import Execution
from passes.search.recipe_space import Pipe


def recipe_of(pipe: Pipe, blocks: int, micro_batches: int) -> Execution:
    """A recipe with a pipeline for a model of `blocks` blocks, and with `micro_batches` as its global batch."""
    return replace(pipe.recipe(blocks), global_batch=micro_batches)
