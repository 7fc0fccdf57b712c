"""Four plans of a Llama on two ranks whose communication can be hidden, each with another split over the axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import autoshard
from autoshard import Cluster, Mesh, P, PartitionSpec
from autoshard.runtime.train_step import TrainStep
from cost_models.hardware import node_type
from tests.benchmarks.step_tensor_parallel import tensor_specs
from tests.models import build

AXIS = "model"
WORDS = 256

LINKED = Cluster(node_type("cpu_laptop").with_network("ethernet_1g"), nodes=2, devices_per_node=1)
"""Two ranks whose processors wait for the link, unlike ranks of one machine, which are busy with messages."""


def llama(layers: int, hidden: int) -> nn.Module:
    """Return a Llama with an untied head, and equal random weights at each call."""
    return build("llama", layers=layers, width=hidden, inner=2 * hidden, heads=4, words=WORDS)


def batch(rows: int, length: int, seed: int = 0) -> dict[str, Tensor]:
    """Return random words, equal on every rank."""
    words = torch.randint(0, WORDS, (rows, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": words, "labels": words.clone()}


def _all(model: nn.Module, spec: PartitionSpec) -> dict[str, PartitionSpec]:
    return {name: spec for name, _ in model.named_parameters()}


PLANS: Mapping[str, Callable[[nn.Module], Mapping[str, PartitionSpec]]] = {
    "data parallel": lambda model: {**_all(model, P()), "exp*:*": P(), "input:*": P(AXIS)},
    "ZeRO-1": lambda model: {**_all(model, P()), "exp*:*": P(AXIS), "input:*": P(AXIS)},
    "ZeRO-3": lambda model: {**_all(model, P(AXIS)), "exp*:*": P(AXIS), "input:*": P(AXIS)},
    "tensor parallel": tensor_specs,
}
"""Constraints by the plan's name: parameters, the state of AdamW, inputs."""


def compiled(name: str, model: nn.Module, mesh: Any = None) -> TrainStep:
    """The step of AdamW under a plan; on simulated ranks without a mesh."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    step = autoshard.compile(
        *(model, Mesh({AXIS: 2}) if mesh is None else mesh),
        optimizer=optimizer,
        constraints=PLANS[name](model),
        precision=None,
        options=autoshard.Options(check="off"),
        cluster=LINKED,
    )
    assert isinstance(step, TrainStep)
    return step
