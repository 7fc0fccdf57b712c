"""On eight tiny clusters, `plan(global_batch=)` picks each kind of split somewhere, and all plans equal one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard import Cluster, Plan
from cost_models.hardware import Link, node_type
from tests.end_to_end.decoders import LLAMA, decoder
from tests.end_to_end.test_recipe_plans import ADAMW
from tests.end_to_end.training import assert_close, plain_step, whole
from tests.zoo.table import ARCHITECTURES

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of other people's models

Built = tuple[nn.Module, dict[str, torch.Tensor]]


def llama(layers: int = 4, sequence: int = LLAMA.sequence) -> Built:
    """Return a small Llama, which computes its own loss, and its inputs."""
    return decoder(replace(LLAMA, layers=layers, sequence=sequence))


def mixtral() -> Built:
    """Return a small Mixtral and its inputs."""
    return ARCHITECTURES["mixtral"].build()


@dataclass(frozen=True)
class Tiny:
    """A model, and devices ten thousand times slower than an H100, because the model is small.

    Args:
        build: model and inputs.
        nodes, devices: number of nodes, and of devices in a node.
        slower: factor by which links inside and between nodes are slower than an H100's.
        batch: sequences of a step.
    """

    build: Callable[[], Built]
    nodes: int
    devices: int
    slower: tuple[float, float] = (1.0, 1.0)
    batch: int = 8

    def cluster(self) -> Cluster:
        """Return the devices and their links."""
        node = node_type("h100_sxm")
        peaks = {name: peak / 1e4 for name, peak in node.device.peak_flops.items()}
        bandwidth = node.device.memory_bandwidth_bytes_per_s / 1e4
        device = replace(node.device, peak_flops=peaks, memory_bandwidth_bytes_per_s=bandwidth)
        assert node.inter is not None, "boxes are joined"
        intra, inter = _slower(node.intra, self.slower[0]), _slower(node.inter, self.slower[1])
        return Cluster(replace(node.with_device(device), intra=intra, inter=inter), self.nodes, self.devices)


def _slower(link: Link, factor: float) -> Link:
    return replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / factor)


TINY = {
    "two boxes": Tiny(llama, 2, 1),
    "two boxes, slow link": Tiny(llama, 2, 1, (1.0, 1e5)),
    "two boxes of two": Tiny(llama, 2, 2, (1.0, 1e3)),
    "four, long sequences": Tiny(lambda: llama(2, 512), 1, 4, batch=2),
    "two, one long sequence": Tiny(lambda: llama(2, 512), 1, 2, batch=1),
    "experts": Tiny(mixtral, 1, 2),
    "experts, slow link": Tiny(mixtral, 1, 2, (1e5, 1.0)),
    "experts in two boxes of two": Tiny(mixtral, 2, 2, (1.0, 1e3)),
}
"""Clusters and models chosen so that each kind of split is fastest for one of them."""


@cache
def planned(name: str) -> Plan:
    """Return the plan of an unconstrained search."""
    tiny = TINY[name]
    model, inputs = tiny.build()
    asked: dict[str, Any] = {"example_inputs": inputs, "precision": None, "global_batch": tiny.batch}
    return autoshard.plan(model, tiny.cluster(), optimizer=ADAMW(model.parameters()), **asked)


@pytest.mark.parametrize("name", TINY)
def test_what_is_found_trains_as_one_device(name: str) -> None:
    """Under the found plan, the losses of three steps of AdamW equal one device."""
    plan, tiny = planned(name), TINY[name]
    assert plan.runs
    model, inputs = tiny.build()
    inputs = {key: torch.cat([value] * tiny.batch)[: tiny.batch] for key, value in inputs.items()}
    alone, _ = tiny.build()
    alone.load_state_dict(model.state_dict())
    optimizer = ADAMW(alone.parameters())
    step = autoshard.compile(model, plan.mesh, optimizer=ADAMW(model.parameters()), plan=plan)
    for number in range(3):
        loss = plain_step(alone, optimizer, **inputs)
        assert_close(whole(step(**inputs)), loss, f"loss of step {number}")


def test_each_way_to_split_is_chosen_somewhere() -> None:
    """Data, tensor, context, expert and pipeline splits are each chosen for some cluster."""
    recipes = [planned(name).recipe for name in TINY]
    for way in ("data", "tensor", "context", "expert", "pipeline"):
        assert any(recipe is not None and (getattr(recipe, way) or 1) > 1 for recipe in recipes), way
