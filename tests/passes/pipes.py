"""Recipes of pipelines of a space."""

from __future__ import annotations

from autoshard import Recipe
from passes.recipe_search.known_pipes import Pipe


def recipe_of(pipe: Pipe, micro_batches: int) -> Recipe:
    """A recipe of a pipeline, of so many micro-batches."""
    return Recipe(
        pipeline=pipe.pipeline, schedule=pipe.schedule, virtual_stages=pipe.virtual_stages, split_ends=pipe.split_ends,
        global_batch=micro_batches,
    )  # fmt: skip
