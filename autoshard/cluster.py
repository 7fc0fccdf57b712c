"""The public `Cluster`, the hardware to price plans for, and functions that describe this machine as a cluster."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, Unpack

import torch
from torch.distributed.device_mesh import DeviceMesh

from autoshard.errors import NotAvailableError
from autoshard.ir.cluster_mesh import ClusterMesh
from autoshard.ir.cost_errors import errors_of_ours
from autoshard.ir.mesh import Mesh
from autoshard.runtime.launch import world_size
from cost_models.device import Device
from cost_models.errors import CostModelError
from cost_models.hardware import Cluster as PricedCluster
from cost_models.hardware import NodeParts, NodeType, node_of_driver, node_type
from cost_models.topology import GroupLinks


@dataclass(frozen=True, slots=True, init=False)
class Cluster(PricedCluster):
    """Nodes of one kind on one network: the hardware for which `autoshard.plan` predicts times.

    For hardware without a file of its own, use `Cluster.of`, or change a node type's network:
    `Cluster(node_type("h100_sxm").with_network("roce_v2", bytes_per_s_per_device=25e9), nodes=8)`. Here `node_type` is
    imported from `cost_models.hardware`.

    Args:
        node: name of a node type, a file of `cost_models/data/nodes` ("h100_sxm"); or a
            `cost_models.hardware.NodeType`.
        nodes: number of nodes, at least 1. Default: 1.
        devices_per_node: number of devices to use in each node. None (default): all devices of the node type.

    Raises:
        UnknownHardwareError: the node type is unknown (the message lists all names), or has fewer devices. Also if
            several nodes have no network.

    Example:
        >>> Cluster("h100_sxm", nodes=8, devices_per_node=8).size
        64
    """

    def __init__(self, node: str | NodeType, nodes: int = 1, devices_per_node: int | None = None) -> None:
        with errors_of_ours():
            PricedCluster.__init__(self, node, nodes, devices_per_node)

    @classmethod
    def of(cls, unit: str | Device, devices: int, **parts: Unpack[NodeParts]) -> Self:
        """Return a cluster of `devices` devices, put together from parts.

        Args:
            unit: the kind of device, a file name of `cost_models/data/devices` ("a100_sxm_40gb") or a
                `cost_models.device.Device`.
            devices: number of devices in all nodes together.
            parts: `devices_per_node` is required. `fabric` and `network` name files of `cost_models/data`; by default,
                a cluster has the device's usual fabric and no network. `network_bytes_per_s_per_device` is a device's
                share of its node's network in each direction, by default the network's own.

        Raises:
            UnknownHardwareError: a part is unknown or missing, or several nodes have no network. Also if `devices` is
                above `devices_per_node`, but not a multiple of it.

        Example:
            >>> Cluster.of("a100_sxm_40gb", 64, devices_per_node=8, network="roce_v2",
            ...            network_bytes_per_s_per_device=25e9).nodes
            8
        """
        with errors_of_ours():
            found = PricedCluster.of(unit, devices, **parts)
        return cls(found.node, found.nodes, found.devices_per_node)

    def mesh(self, axes: Mapping[str, int] | Mesh | DeviceMesh) -> ClusterMesh:
        """Return a mesh of these devices, for `autoshard.plan` with given axes.

        Args:
            axes: size of each axis by name; or an `autoshard.Mesh`, or a torch `DeviceMesh` with names. Ranks are in
                row-major order, so the last axis joins devices of one node first.

        Raises:
            MeshError: the product of the sizes is not the number of devices.

        Example:
            >>> str(Cluster("h100_sxm", nodes=8).mesh({"data": 8, "model": 8}))
            'Mesh(data=8, model=8) on h100_sxm:8x8'
        """
        if isinstance(axes, DeviceMesh):
            return ClusterMesh(self, Mesh.from_device_mesh(axes))
        return ClusterMesh(self, axes if isinstance(axes, Mesh) else Mesh(axes))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a cluster file that `Cluster.save`, `Calibration.save` or `autoshard calibrate --out` wrote.

        Raises:
            UnknownHardwareError: there is no such file, or the file does not describe a cluster.
        """
        with errors_of_ours():
            found = PricedCluster.load(path)
        return cls(found.node, found.nodes, found.devices_per_node)


def device_of_plans(target: Any) -> torch.device:
    """Return the device to plan for: "cuda" if the hardware has GPUs, otherwise "cpu".

    The hardware is `target` if it is a cluster. For a mesh it is this machine.
    """
    has_gpu = bool(target.device.dispatch_s) if isinstance(target, PricedCluster) else torch.cuda.is_available()
    return torch.device("cuda" if has_gpu else "cpu")


def distinct_meshes(meshes: Iterable[Mesh], cluster: PricedCluster) -> list[Mesh]:
    """Return the meshes without repeats; names and order of a mesh's axes are ignored.

    Two axes are the same if they have equal sizes, and equal links on `cluster`. The first of equal meshes is kept.

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
    """Return the machines of this run as a cluster, with a device for each rank of a mesh.

    The devices are CPUs if there is no GPU, or if one process simulates the ranks. Hosts without GPUs count as joined
    by gigabit Ethernet; `calibrate` measures the real network.

    Raises:
        NotAvailableError: no hardware file describes the GPUs, or this host has more of them than its node type.
    """
    if world_size() != mesh.size or not torch.cuda.is_available():
        per_node = ranks_per_host(mesh.size)
        kind = node_type("cpu_laptop")
        kind = kind if per_node == mesh.size else kind.with_network("ethernet_1g")
        kind = replace(kind, devices_per_node=max(per_node, kind.devices_per_node))
        return PricedCluster(kind, mesh.size // per_node, per_node)
    per_node = ranks_per_host(mesh.size)
    try:
        name = node_of_driver(torch.cuda.get_device_name())
        return PricedCluster(name, nodes=mesh.size // per_node, devices_per_node=per_node)
    except CostModelError as error:
        raise NotAvailableError(f"{error} Or pass a Cluster.") from error


def ranks_per_host(ranks: int) -> int:
    """Return the number of ranks on each host of `torchrun`.

    Return `ranks` without `torchrun`, or if the number of ranks on this host does not divide `ranks`.
    """
    found = int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) if world_size() == ranks > 1 else ranks
    return found if ranks % found == 0 else ranks
