"""What a search over recipes begins with: the recipe of another plan, where it will do, or the best one like it."""

from __future__ import annotations

from autoshard.errors import RecipeError
from autoshard.ir.execution import Execution
from autoshard.ir.recipe import Recipe
from cost_models.errors import CostModelError
from passes.recipe_search.recipe_problem import RecipeProblem
from passes.recipe_search.recipe_space import Only
from passes.solver.search_control import Ceiling


def known_recipe(problem: RecipeProblem, before: Recipe, ceiling: Ceiling | None = None) -> Execution | None:
    """A recipe of a problem: that of another plan, if it fits and keeps the constraints; else the fastest like it.

    Like it are recipes that cut a micro-batch as it does (`alike`): on another number of devices these
    have other replicas or pipeline ranks. None where there is none of these either, or the ceiling cuts first.
    """
    try:
        recipe = problem.base.of(before)
        if problem.admits(recipe):
            return recipe
    except (RecipeError, CostModelError):
        pass  # it is no recipe for this cluster or batch
    return problem.best(only=alike(before), ceiling=ceiling).recipe


_ALIKE = (
    "tensor", "sequence_parallel", "context", "expert", "expert_tensor", "micro_batch", "recompute", "offload", "zero",
)  # fmt: skip
"""The fields by which a recipe cuts a micro-batch, and keeps and shards what it makes."""


def alike(recipe: Recipe) -> Only:
    """The recipes that have these fields as one has."""
    return {name: (getattr(recipe, name),) for name in _ALIKE if getattr(recipe, name) is not None}
