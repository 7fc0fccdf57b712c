"""The search for a model's recipe, without a call of `autoshard.plan`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import strategies as st
from torch import nn

from autoshard.arguments import ExampleInputs
from autoshard.ir.execution import Execution
from autoshard.ir.runtime import Runtime
from cost_models.hardware import Cluster
from passes.driver.pricing import priced_model
from passes.search.recipe_problem import RecipeProblem
from passes.search.recipe_space import Only

RUNTIMES = st.builds(
    Runtime,
    name=st.just("mine"),
    overlap_pipeline=st.booleans(),
    overlap_parameters=st.booleans(),
    overlap_gradients=st.booleans(),
    overlap_tensor=st.booleans(),
    overlap_expert=st.booleans(),
    overlap_offload=st.booleans(),
    early_stop=st.booleans(),
    folded_experts=st.booleans(),
    fused=st.just(True),
    gradient_dtype=st.sampled_from(["f32", "bf16"]),
    cuda_graph=st.booleans(),
    bucket_bytes=st.sampled_from([10_000, 200_000_000]),
)
"""Drawn runtimes, with all fields on which bounds of the search depend."""


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
    """The problem of a model's fastest recipe; `best(only={"pipeline": (8,)})` searches with a fixed field."""
    counted = priced_model(model, example_inputs, loss_fn, base.precision).counted
    return RecipeProblem(counted, cluster, base, memory_limit, pinned=pinned or {})
