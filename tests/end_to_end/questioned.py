"""Models, clusters, meshes and plans of different kinds, for tests that ask questions of plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn

import autoshard
from autoshard import Cluster, Mesh, Plan, Recipe
from autoshard.ir.cluster_mesh import ClusterMesh
from cost_models.hardware import Cluster as PricedCluster
from cost_models.hardware import node_type
from passes.driver.plan_again import PlanAgain
from passes.questions.ask import Questions
from tests.models import Blocks
from tests.passes.decoders import PRICED
from tests.zoo.table import ARCHITECTURES

Built = tuple[nn.Module, Any]


class Convolutions(nn.Module):
    """A convolution, residual blocks of convolutions and group norms, and a linear head."""

    def __init__(self, depth: int = 3, channels: int = 16) -> None:
        super().__init__()
        self.enter, self.head = nn.Conv2d(3, channels, 3, padding=1), nn.Linear(channels, 10)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(4, channels), nn.ReLU())
            for _ in range(depth)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.enter(images)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3))).float().square().mean()


def _perceptron(dtype: torch.dtype) -> Built:
    return Blocks(128, 3, 256).to(dtype), (torch.zeros(8, 128, dtype=dtype),)


OWN: Mapping[str, Callable[[], Built]] = {
    "perceptron in f32": lambda: _perceptron(torch.float32),
    "perceptron in bf16": lambda: _perceptron(torch.bfloat16),
    "convolutions": lambda: (Convolutions(), (torch.zeros(8, 3, 8, 8),)),
}
"""Small models of this file, which are traced in a moment."""

OTHERS: Mapping[str, Callable[[], Built]] = {
    name: ARCHITECTURES[name].build for name in ("gpt2", "t5", "mixtral", "vit", "resnet")
}
"""Models of `tests.zoo`, from public libraries."""


@cache
def built(name: str) -> Built:
    """Return a model and its inputs; the result is cached."""
    return {**OWN, **OTHERS}[name]()


def _slowed(times: float = 1e4) -> Cluster:
    """Return a cluster of four H100s whose FLOPs and memory bandwidth are divided by `times`, for small models."""
    node = node_type("h100_sxm")
    unit = node.device
    slow = replace(
        unit,
        peak_flops={name: peak / times for name, peak in unit.peak_flops.items()},
        memory_bandwidth_bytes_per_s=unit.memory_bandwidth_bytes_per_s / times,
    )
    return Cluster(node.with_device(slow), nodes=1, devices_per_node=4)


UNIFORM: Mapping[str, Cluster] = {
    "a node": Cluster("h100_sxm", 1, 4),
    "two nodes": Cluster("a100_sxm_80gb", 2, 2),
    "slow devices": _slowed(),
}
MESHES: Mapping[str, Mesh] = {"square": Mesh({"data": 2, "model": 2}), "line": Mesh({"data": 4})}


@cache
def plan_of_recipe(name: str, place: str, share: float | None = None) -> Plan:
    """Return the plan of the fastest recipe; `share` limits memory to that share of the unlimited plan's peak."""
    model, inputs = built(name)
    budget = None if share is None else int(share * plan_of_recipe(name, place).predicted.peak_memory_bytes)
    return autoshard.plan(
        model,
        UNIFORM[place],
        example_inputs=inputs,
        optimizer="adamw",
        runtime=PRICED,
        global_batch=8,
        memory_budget=budget,
    )


def price(name: str, cluster: PricedCluster, recipe: Recipe) -> Plan:
    """Return the priced plan of a recipe, from `autoshard.price`."""
    model, inputs = built(name)
    return autoshard.price(model, cluster, recipe, example_inputs=inputs, runtime=PRICED, global_batch=8)


def plan_of_specs(name: str, cluster: PricedCluster, mesh: str, **options: Any) -> Plan:
    """Return the fastest plan on a mesh of `MESHES`, without a search over recipes."""
    model, inputs = built(name)
    return autoshard.plan(
        model, ClusterMesh(cluster, MESHES[mesh]), example_inputs=inputs, optimizer="adamw", **options
    )


def replan_of(plan: Plan) -> PlanAgain:
    """Return the callable that plans the plan's model again with one `Change`."""
    assert isinstance(plan.alternatives, Questions)
    assert isinstance(plan.alternatives.replan, PlanAgain)
    return plan.alternatives.replan
