"""Estimate the time of single nodes of a lowered program.

Collectives are priced by their formulas, and other calls by the bytes that they read and write. So kernels and
operators without a formula have a time too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from autoshard.graphs.aliases import aliased_operands
from autoshard.ir.collectives import is_collective
from autoshard.ir.mesh import Mesh
from cost_models.compute import memory_time
from cost_models.hardware import Cluster
from passes.strategies.collective_nodes import collective_time
from passes.strategies.tensor_infos import bytes_in


@dataclass(frozen=True, slots=True)
class NodeTime:
    """A function from a node to its seconds on one rank, or without a cluster to the bytes that it reads and writes."""

    mesh: Mesh
    cluster: Cluster | None

    def __call__(self, node: fx.Node) -> float:
        """Return the seconds of one run of a node on one rank (bytes without a cluster), or 0 for views and waits."""
        if not isinstance(node.target, torch._ops.OpOverload) or aliased_operands(node):
            return 0.0
        moved = sum(bytes_in(item.meta.get("val")) for item in (node, *node.all_input_nodes))
        if self.cluster is None:
            return moved
        if is_collective(node):
            return collective_time(node, self.mesh, self.cluster)
        return self.cluster.device.launch_latency_s + memory_time(moved, self.cluster.device)
