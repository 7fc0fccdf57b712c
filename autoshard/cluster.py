"""The hardware that plans are priced for: the public `Cluster`, and this machine as one."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, Unpack

import torch
from torch.distributed.device_mesh import DeviceMesh

from autoshard.errors import NotAvailableError, UnknownHardwareError
from autoshard.ir.cluster_mesh import ClusterMesh
from autoshard.ir.mesh import Mesh
from autoshard.runtime.launch import world_size
from cost_models.device import Device
from cost_models.errors import CostModelError
from cost_models.hardware import Cluster as PricedCluster
from cost_models.hardware import NodeParts, NodeType, node_of_driver, node_type
from cost_models.topology import GroupLinks


@contextmanager
def _errors_of_ours() -> Iterator[None]:
    """Cost models know nothing of our errors; what they refuse is raised as one of them."""
    try:
        yield
    except CostModelError as error:
        raise UnknownHardwareError(str(error)) from error


@dataclass(frozen=True, slots=True, init=False)
class Cluster(PricedCluster):
    """Nodes of one kind on one network: what plans are priced for.

    Hardware that has no name of its own is put together from parts with `of`, or by changing a part of a node type:
    `Cluster(node_type("h100_sxm").with_network("roce_v2", bytes_per_s_per_device=25e9), nodes=8)`.

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
        with _errors_of_ours():
            PricedCluster.__init__(self, node, nodes, devices_per_node)

    @classmethod
    def of(cls, unit: str | Device, devices: int, **parts: Unpack[NodeParts]) -> Self:
        """A cluster of `devices` devices from its parts; fewer than a node's are part of one node.

        Args:
            unit: a device of the data files ("a100_sxm_40gb"), or a `cost_models.device.Device`.
            devices: devices in all.
            parts: `devices_per_node`, and `fabric`, `network` and `network_bytes_per_s_per_device` where they are not
                the device's usual ones; see `cost_models.hardware.NodeParts`.

        Raises:
            UnknownHardwareError: no such part, several nodes and no network, or counts that cannot be.

        Example:
            >>> Cluster.of("a100_sxm_40gb", 64, devices_per_node=8, network="roce_v2",
            ...            network_bytes_per_s_per_device=25e9).nodes
            8
        """
        with _errors_of_ours():
            found = PricedCluster.of(unit, devices, **parts)
        return cls(found.node, found.nodes, found.devices_per_node)

    def mesh(self, axes: Mapping[str, int] | Mesh | DeviceMesh) -> ClusterMesh:
        """A mesh of these devices: what `autoshard.plan` plans on where the axes are decided.

        Args:
            axes: axis name to size, the outermost first; or a mesh that has them.

        Raises:
            MeshError: the sizes do not make as many ranks as there are devices.

        Example:
            >>> str(Cluster("h100_sxm", nodes=8).mesh({"data": 8, "model": 8}))
            'Mesh(data=8, model=8) on h100_sxm:8x8'
        """
        if isinstance(axes, DeviceMesh):
            return ClusterMesh(self, Mesh.from_device_mesh(axes))
        return ClusterMesh(self, axes if isinstance(axes, Mesh) else Mesh(axes))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a cluster file, as `save` or `autoshard calibrate` wrote it; `UnknownHardwareError` if it is none."""
        with _errors_of_ours():
            found = PricedCluster.load(path)
        return cls(found.node, found.nodes, found.devices_per_node)


def device_of_plans(target: Any) -> torch.device:
    """The kind of device that plans are for: a cluster has GPUs, unless it is this machine without any."""
    has_gpu = bool(target.device.dispatch_s) if isinstance(target, PricedCluster) else torch.cuda.is_available()
    return torch.device("cuda" if has_gpu else "cpu")


def distinct_meshes(meshes: Iterable[Mesh], cluster: PricedCluster) -> list[Mesh]:
    """The meshes, of those that are one mesh under several names the first.

    Example:
        >>> meshes = [Mesh({"data": 8}), Mesh({"model": 8}), Mesh({"data": 4, "model": 2})]
        >>> [str(mesh) for mesh in distinct_meshes(meshes, Cluster("h100_sxm"))]
        ['Mesh(data=8)', 'Mesh(data=4, model=2)']
    """
    found: dict[frozenset[tuple[GroupLinks, int]], Mesh] = {}
    for mesh in meshes:
        links = (cluster.group_links(dict(mesh.axes), (name,)) for name, size in mesh.axes if size > 1)
        found.setdefault(frozenset(Counter(links).items()), mesh)
    return list(found.values())


def local_cluster(mesh: Mesh) -> PricedCluster:
    """The machines of this run, as hardware with a device for each rank of a mesh.

    Hosts without GPUs are taken to be joined by gigabit Ethernet; `calibrate` measures what joins them.

    Raises:
        NotAvailableError: there are GPUs that no hardware file describes.
    """
    if world_size() != mesh.size or not torch.cuda.is_available():
        per_node = ranks_per_host(mesh.size)
        kind = node_type("cpu_laptop")
        kind = kind if per_node == mesh.size else kind.with_network("ethernet_1g")
        kind = replace(kind, devices_per_node=max(per_node, kind.devices_per_node))
        return PricedCluster(kind, mesh.size // per_node, per_node)
    try:
        name = node_of_driver(torch.cuda.get_device_name())
    except CostModelError as error:
        raise NotAvailableError(f"{error} Or pass a Cluster.") from error
    per_node = ranks_per_host(mesh.size)
    return PricedCluster(name, nodes=mesh.size // per_node, devices_per_node=per_node)


def ranks_per_host(ranks: int) -> int:
    """How many of the ranks that run are on each host, as `torchrun` says; all of them where it says nothing."""
    found = int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) if world_size() == ranks > 1 else ranks
    return found if ranks % found == 0 else ranks
