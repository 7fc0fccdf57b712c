"""Recipes of pipelines of a space."""

from __future__ import annotations

from dataclasses import replace

from autoshard.ir.execution import Execution
from passes.search.recipe_space import Pipe


def recipe_of(pipe: Pipe, blocks: int, micro_batches: int) -> Execution:
    """A recipe of a pipeline, of so many blocks and micro-batches."""
    return replace(pipe.recipe(blocks), global_batch=micro_batches)
