"""The search for a model's recipe, without a call of `autoshard.plan`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from autoshard.arguments import ExampleInputs
from autoshard.ir.execution import Execution
from cost_models.hardware import Cluster
from passes.driver.pricing import priced_model
from passes.search.recipe_problem import RecipeProblem
from passes.search.recipe_space import Only


def recipe_problem(
    model: nn.Module,
    cluster: Cluster,
    base: Execution,
    *,
    example_inputs: ExampleInputs,
    memory_limit: float,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    pinned: Only | None = None,
) -> RecipeProblem:
    """The search for a model's recipe: its `best(only={"pipeline": (8,)})` is the fastest with a field fixed."""
    counted = priced_model(model, example_inputs, loss_fn, base.precision).counted
    return RecipeProblem(counted, cluster, base, memory_limit, pinned=pinned or {})
