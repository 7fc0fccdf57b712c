"""What plans are priced for: the public `Cluster`, this machine as one, and the meshes that suit one."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from autoshard.errors import NotAvailableError, UnknownHardwareError
from autoshard.ir.mesh import Mesh
from autoshard.runtime.launch import world_size
from cost_models.errors import CostModelError
from cost_models.hardware import Cluster as PricedCluster
from cost_models.hardware import NodeType, node_type

_NODES_BY_DEVICE = {"H200": "h200", "H100": "h100_sxm", "A100": "a100_sxm_80gb"}


@dataclass(frozen=True, slots=True, init=False)
class Cluster(PricedCluster):
    """Nodes of one kind behind a non-blocking network: what plans are priced for.

    Args:
        node: a node type's name ("h100_sxm"), or a `cost_models.hardware.NodeType`.
        nodes: number of nodes.
        devices_per_node: devices used in each; the node type's own number if None.

    Raises:
        UnknownHardwareError: no such node type, or counts that it cannot have.

    Example:
        >>> Cluster("h100_sxm", nodes=8, devices_per_node=8).size
        64
    """

    def __init__(self, node: str | NodeType, nodes: int = 1, devices_per_node: int | None = None) -> None:
        try:
            PricedCluster.__init__(self, node, nodes, devices_per_node)
        except CostModelError as error:
            raise UnknownHardwareError(str(error)) from error

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Read a cluster file, as `save` or `autoshard calibrate` wrote it; `UnknownHardwareError` if it is none."""
        try:
            found = PricedCluster.load(path)
        except CostModelError as error:
            raise UnknownHardwareError(str(error)) from error
        return cls(found.node, found.nodes, found.devices_per_node)


def candidate_meshes(cluster: PricedCluster) -> list[Mesh]:
    """The meshes that are tried for a cluster: "model" within a node, "data" over the rest; no axes of one."""
    sizes = [size for size in range(1, cluster.devices_per_node + 1) if cluster.devices_per_node % size == 0]
    shapes = [{"data": cluster.size // size, "model": size} for size in sizes]
    meshes = [Mesh({axis: size for axis, size in shape.items() if size > 1} or {"data": 1}) for shape in shapes]
    return list(dict.fromkeys(meshes))


def local_cluster(mesh: Mesh) -> PricedCluster:
    """This machine, as hardware with a device for each rank of a mesh.

    Raises:
        NotAvailableError: it has GPUs that no hardware file describes.
    """
    if world_size() != mesh.size or not torch.cuda.is_available():
        kind = node_type("cpu_laptop")
        return PricedCluster(replace(kind, devices_per_node=max(mesh.size, kind.devices_per_node)), 1, mesh.size)
    found = torch.cuda.get_device_name()
    name = next((node for part, node in _NODES_BY_DEVICE.items() if part in found), None)
    if name is None:
        raise NotAvailableError(
            f"No hardware file describes {found!r}; there are {', '.join(_NODES_BY_DEVICE.values())}. Pass a Cluster."
        )
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", mesh.size))
    return PricedCluster(name, nodes=mesh.size // per_node, devices_per_node=per_node)
