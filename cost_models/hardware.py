"""Clusters: node types and links, read from sourced data files, assembled by hand, or measured by `calibration`.

Links have three levels. Devices of a node share a fabric (`intra`), and nodes share a network (`inter`). A network may
consist of pods behind an oversubscribed spine. Ranks are row-major over the mesh axes, the last axis fastest. With d
devices per node, node i has ranks [i * d, (i + 1) * d).

Data files refer to each other: a node to a device, a fabric and a network; a device to an architecture. So each part
can be exchanged: `node_type("h100_sxm").with_network("roce_v2", bytes_per_s_per_device=25e9)`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Required, Self, TypedDict, Unpack

from cost_models import constants
from cost_models.constants import Constant, HardwareFile
from cost_models.device import Device, MatmulCurve, device, device_numbers, read_device
from cost_models.errors import HardwareFileError, TopologyError, UnknownHardwareError
from cost_models.link_files import link_numbers, read_link
from cost_models.step import ALONE, InStep
from cost_models.step import in_step as fitted
from cost_models.topology import (
    SWITCHED,
    GroupLinks,
    Link,
    NodeWiring,
    Wiring,
    group_links,
)

__all__ = [
    "Cluster",
    "Device",
    "MatmulCurve",
    "NodeParts",
    "NodeType",
    "assemble_node",
    "device",
    "node_of_driver",
    "node_type",
]

MAX_DEVICES = 2**20
"""The most devices of a cluster: ten times the largest cluster that trained a model, and few enough to list."""


@dataclass(frozen=True, slots=True)
class NodeType:
    """A kind of node: its device, the number of devices, the fabric inside and the network outside.

    Args:
        intra: the fabric in the node, as a link of one device: all direct links of the device together.
        inter: the network: one device's share of the node's network cards. None if nodes are not joined.
        wiring: links and network cards that devices share.
        host_memory_bytes: memory of the node's host, None if unknown.
    """

    name: str
    device: Device
    devices_per_node: int
    intra: Link
    inter: Link | None
    wiring: Wiring = SWITCHED
    host_memory_bytes: int | None = None

    def with_network(
        self,
        network: str | Link | None = None,
        *,
        bytes_per_s_per_device: float | None = None,
        devices_per_nic: int | None = None,
        nodes_per_pod: int | None = None,
        oversubscription: float | None = None,
    ) -> NodeType:
        """Return the node on another network, or with another bandwidth or topology of its network.

        Args:
            network: a network of the data files ("infiniband_ndr400", "roce_v2", "efa_v2", "omni_path"), with its
                efficiency and latencies; a `Link`; or None to keep the present network.
            bytes_per_s_per_device: a device's share of its node's network cards in each direction; default: the
                network's own (400 Gbit/s for every two devices are 25e9).
            devices_per_nic: devices that share one card.
            nodes_per_pod: nodes below one leaf, with full bandwidth among them; 0 for all nodes.
            oversubscription: bandwidth of a pod's cards over that of its uplink to the spine (2 for 2:1).

        Raises:
            UnknownHardwareError: the network is unknown, or the node has no network to change.
            TopologyError: `devices_per_nic` or `oversubscription` is below 1, `nodes_per_pod` is below 0, or the
                bandwidth is not positive.

        Example:
            >>> node_type("a100_sxm_80gb").with_network(bytes_per_s_per_device=6.25e9).inter.bandwidth_bytes_per_s
            6250000000.0
        """
        link, wiring = self.inter, self.wiring
        if isinstance(network, Link):
            link = network
        elif network is not None:
            file = constants.load("networks", network)
            link, wiring = read_link(file), _network_wiring(file, wiring)
        if link is None:
            raise UnknownHardwareError(
                f"Node type {self.name!r} has no network to change; name one: {', '.join(constants.names('networks'))}."
            )
        if bytes_per_s_per_device is not None:
            link = replace(link, bandwidth_bytes_per_s=bytes_per_s_per_device)
        given = {
            "devices_per_nic": devices_per_nic,
            "nodes_per_pod": nodes_per_pod,
            "oversubscription": oversubscription,
        }
        wiring = replace(wiring, **{key: value for key, value in given.items() if value is not None})
        _check_network(link, wiring)
        return replace(self, inter=link, wiring=wiring)

    def with_device(self, unit: str | Device) -> NodeType:
        """Return the node with another device. Raises UnknownHardwareError if no data file has the device's name."""
        return replace(self, device=device(unit) if isinstance(unit, str) else unit)


class NodeParts(TypedDict, total=False):
    """Parts of a node besides its device, as keyword arguments of `assemble_node`.

    Args:
        fabric: a fabric of the data files ("nvlink3_nvswitch", "pcie4"), or a `Link` of a switch that joins all
            devices. None for the fabric of the device's usual boards, which its file names.
        network: a network of the data files ("infiniband_hdr200", "roce_v2"), or a `Link`. None if nodes are not
            joined.
        network_bytes_per_s_per_device: a device's share of its node's network cards; default: the network's own.
    """

    devices_per_node: Required[int]
    fabric: str | Link | None
    network: str | Link | None
    network_bytes_per_s_per_device: float | None


def assemble_node(
    unit: str | Device,
    devices_per_node: int,
    *,
    fabric: str | Link | None = None,
    network: str | Link | None = None,
    network_bytes_per_s_per_device: float | None = None,
    name: str | None = None,
) -> NodeType:
    """Assemble a node type from parts, for hardware without a file of its own.

    Args:
        unit: a device of the data files ("a100_sxm_40gb"), or a `Device`.
        devices_per_node, fabric, network, network_bytes_per_s_per_device: the keys of `NodeParts`.
        name: name of the node type; default: composed of the parts.

    Raises:
        UnknownHardwareError: a part is unknown, or the device's file names no fabric and none is given.
        TopologyError: the number of devices or the bandwidth is impossible.

    Example:
        >>> assemble_node("a100_sxm_40gb", 8, network="roce_v2", network_bytes_per_s_per_device=25e9).name
        'a100_sxm_40gb:8:nvlink3_nvswitch:roce_v2'
    """
    if not isinstance(unit, str | Device):
        raise UnknownHardwareError(f"unit={unit!r} is a {type(unit).__name__}; pass the name of a device.")
    chosen = device(unit) if isinstance(unit, str) else unit
    fabric = _usual_fabric(chosen) if fabric is None else fabric
    if isinstance(fabric, Link):
        intra, wiring = fabric, SWITCHED
    else:
        file = constants.load("fabrics", fabric)
        intra, wiring = read_link(file), _wiring(file)
    parts = (chosen.name, devices_per_node, fabric, network)
    label = name or ":".join(str(part) for part in parts if isinstance(part, str | int))
    node = NodeType(label, chosen, devices_per_node, intra, None, wiring)
    _check_layout(node)
    if network is None:
        return node
    return node.with_network(network, bytes_per_s_per_device=network_bytes_per_s_per_device)


@dataclass(frozen=True, slots=True, init=False)
class Cluster:
    """Nodes of one kind on one network.

    Args:
        node: a node type's name ("h100_sxm") or a `NodeType`.
        nodes: number of nodes.
        devices_per_node: number of devices used in each node; None for all.
        in_step: slowdown of kernels and collectives in a step, compared with a benchmark. Default: the fitted factors
            for a cluster of several GPUs, and no slowdown (`ALONE`) for any other cluster.

    Raises:
        UnknownHardwareError: the node type is unknown, or several nodes have no network.
        TopologyError: a number is below 1, `devices_per_node` exceeds the devices of the node type, or the cluster has
            more than `MAX_DEVICES` devices.

    Example:
        >>> Cluster("h100_sxm", nodes=8, devices_per_node=8).size
        64
    """

    node: NodeType
    nodes: int
    devices_per_node: int
    in_step: InStep = field(init=False)
    device: Device = field(init=False, repr=False, compare=False)
    """The device of each rank, at its speed in a step."""
    intra: Link = field(init=False, repr=False, compare=False)
    """The fabric in a node, at its speed in a step."""
    inter: Link | None = field(init=False, repr=False, compare=False)
    """The network between nodes, at its speed in a step."""

    def __init__(
        self,
        node: str | NodeType,
        nodes: int = 1,
        devices_per_node: int | None = None,
        in_step: InStep | None = None,
    ) -> None:
        if not isinstance(node, str | NodeType):
            raise UnknownHardwareError(f"node={node!r} is a {type(node).__name__}; pass the name of a node type.")
        kind = node_type(node) if isinstance(node, str) else node
        per_node = kind.devices_per_node if devices_per_node is None else devices_per_node
        _check_shape(kind, nodes, per_node)
        object.__setattr__(self, "node", kind)
        object.__setattr__(self, "nodes", nodes)
        object.__setattr__(self, "devices_per_node", per_node)
        is_group = nodes * per_node > 1 and bool(kind.device.dispatch_s)
        factors = in_step or (fitted() if is_group else ALONE)
        object.__setattr__(self, "in_step", factors)
        object.__setattr__(self, "device", kind.device.slowed(factors.kernels))
        object.__setattr__(self, "intra", replace(kind.intra, ramp_bytes=factors.ramp * kind.intra.ramp_bytes))
        object.__setattr__(self, "inter", kind.inter and kind.inter.slowed(factors.network))

    @classmethod
    def of(cls, unit: str | Device, devices: int, **parts: Unpack[NodeParts]) -> Self:
        """Make a cluster of `devices` devices from parts. Fewer devices than a node has are a part of one node.

        Args:
            unit: a device of the data files ("a100_sxm_40gb"), or a `Device`.
            parts: the keys of `NodeParts`; `devices_per_node` is required.

        Raises:
            UnknownHardwareError: a part is unknown, or several nodes have no network.
            TopologyError: a count is impossible, or `devices` is no multiple of `devices_per_node`.

        Example:
            >>> Cluster.of("v100_sxm2_32gb", 64, devices_per_node=4, fabric="nvlink2_mesh", network="omni_path").nodes
            16
        """
        unknown = [name for name in parts if name not in NodeParts.__annotations__]
        if unknown:
            known = ", ".join(NodeParts.__annotations__)
            raise UnknownHardwareError(f"{unknown[0]!r} is no part of a node; there are {known}.")
        if "devices_per_node" not in parts:
            raise TopologyError("devices_per_node= is missing: say how many devices one node holds.")
        node, per_node = assemble_node(unit, **parts), parts["devices_per_node"]
        if not isinstance(devices, int) or isinstance(devices, bool) or devices < 1:
            raise TopologyError(f"A cluster of {devices!r} devices cannot be; give a whole number of at least 1.")
        if devices < per_node:
            return cls(node, 1, devices)
        if devices % per_node:
            raise TopologyError(f"{devices} devices do not fill nodes of {per_node}.")
        return cls(node, devices // per_node)

    @property
    def name(self) -> str:
        """The cluster's name on the command line, e.g. "h100_sxm:8x8"."""
        return f"{self.node.name}:{self.nodes}x{self.devices_per_node}"

    @property
    def size(self) -> int:
        """Number of devices of the cluster: nodes times used devices per node."""
        return self.nodes * self.devices_per_node

    @property
    def host_bytes_per_device(self) -> float | None:
        """Each used device's share of its node's host memory; None if unknown."""
        total = self.node.host_memory_bytes
        return None if total is None else total / self.devices_per_node

    def group_links(self, mesh_axes: Mapping[str, int], axes: tuple[str, ...]) -> GroupLinks:
        """Return the links of a group of ranks over mesh axes, e.g. ("data", "model") for a reshard over both.

        `mesh_axes` maps the name of a mesh axis to its size, outermost axis first.
        """
        shape, node = tuple(mesh_axes.items()), self.node
        places = (self.nodes, self.devices_per_node, self.intra, self.inter, node.wiring, node.devices_per_node)
        return group_links(shape, axes, *places)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a cluster file that `save` or a calibration wrote. Raises HardwareFileError for any other file."""
        file = constants.read(constants.check_file(path))
        return cls.of_file(file)

    @classmethod
    def of_file(cls, file: HardwareFile) -> Self:
        """Make a cluster of a parsed file that `save` wrote.

        Raises HardwareFileError if a constant is missing or wrong.
        """
        kind = _node(file, read_device(file, file.text("device")))
        used = file.count("used_devices_per_node", "devices")
        return cls(kind, nodes=file.count("nodes", "nodes"), devices_per_node=used)

    def to_file(self, source: str, date: str) -> HardwareFile:
        """Return the cluster as a file for `of_file`, in which each number has `source` and `date` (an ISO date)."""
        items = {key: Constant(value, unit, source, date) for key, (value, unit) in _cluster_numbers(self).items()}
        texts = {"name": self.node.name, "device": self.node.device.name, "layout": self.node.wiring.layout.value}
        if self.node.device.attention:
            texts["attention_kernel"] = next(iter(self.node.device.attention))
        return HardwareFile(texts, items, self.name)

    def save(self, path: str | Path, *, source: str, date: str) -> None:
        """Write the cluster as a TOML file, in which each number has `source` and `date` (an ISO date)."""
        file = self.to_file(source, date)
        Path(path).write_text(constants.dump(file.texts, file.constants), encoding="utf-8")


def node_type(name: str) -> NodeType:
    """Load a node type of the data files. Raises UnknownHardwareError, with the known names, for an unknown name."""
    file = constants.load("nodes", name)
    for key, folder, prefix in (("fabric", "fabrics", "intra."), ("network", "networks", "inter.")):
        if key in file.texts:
            file = file.overlay(constants.load(folder, file.text(key)), prefix)
    return _node(file, device(file.text("device")))


def node_of_driver(device_name: str) -> str:
    """Return the name of the node type of a device, given the device's name in its driver.

    The longest `driver_name` of the data files that is a part of `device_name` wins.

    Raises:
        UnknownHardwareError: no `driver_name` is a part of `device_name`. The message lists all `driver_name`s.

    Example:
        >>> node_of_driver("NVIDIA H100 80GB HBM3"), node_of_driver("NVIDIA H100 PCIe")
        ('h100_sxm', 'h100_pcie')
    """
    texts = [constants.load("nodes", name).texts for name in constants.names("nodes")]
    known = {found["driver_name"]: found["name"] for found in texts if "driver_name" in found}
    fitting = [part for part in known if re.search(rf"\b{re.escape(part)}\b", device_name)]
    if not fitting:
        raise UnknownHardwareError(
            f"No hardware file describes {device_name!r}; there are {', '.join(sorted(known))}. "
            "Add `driver_name` to its file in cost_models/data/nodes."
        )
    return known[max(fitting, key=len)]


def _node(file: HardwareFile, unit: Device) -> NodeType:
    node = NodeType(
        name=file.text("name"),
        device=unit,
        devices_per_node=file.count("devices_per_node", "devices"),
        intra=read_link(file, "intra."),
        inter=read_link(file, "inter.") if "inter.bandwidth" in file.constants else None,
        wiring=_network_wiring(file, _wiring(file, "intra."), "inter."),
        host_memory_bytes=int(file.number("host_memory", "B")) if "host_memory" in file.constants else None,
    )
    _check_layout(node)
    return node


def _usual_fabric(unit: Device) -> str:
    if unit.name in constants.names("devices"):
        fabric = constants.load("devices", unit.name).texts.get("fabric")
        if fabric is not None:
            return fabric
    raise UnknownHardwareError(
        f"No fabric is given for device {unit.name!r}; name one of {', '.join(constants.names('fabrics'))}, or a Link."
    )


def _check_shape(kind: NodeType, nodes: int, per_node: int) -> None:
    are_counts = all(isinstance(count, int) and not isinstance(count, bool) for count in (nodes, per_node))
    if not are_counts or nodes < 1 or not 1 <= per_node <= kind.devices_per_node:
        raise TopologyError(
            f"Cluster({kind.name!r}, nodes={nodes!r}, devices_per_node={per_node!r}): at least one node, and 1 to "
            f"{kind.devices_per_node} devices in each, in whole numbers."
        )
    if nodes * per_node > MAX_DEVICES:
        raise TopologyError(
            f"{nodes} nodes of {per_node} devices are too many; at most {MAX_DEVICES} devices are priced."
        )
    if nodes > 1 and kind.inter is None:
        raise UnknownHardwareError(
            f"Node type {kind.name!r} has no network, so nodes={nodes!r} cannot be priced; add the [inter.*] tables to "
            f"its file, or use with_network(): {', '.join(constants.names('networks'))}."
        )


def _check_layout(node: NodeType) -> None:
    if not isinstance(node.devices_per_node, int) or node.devices_per_node < 1:
        raise TopologyError(
            f"Node type {node.name!r} has devices_per_node={node.devices_per_node!r}; a whole number of at least 1."
        )
    if node.wiring.layout is NodeWiring.HYBRID_CUBE_MESH and node.devices_per_node > 8:
        raise TopologyError(
            f"Node type {node.name!r}: a hybrid cube mesh joins 8 devices, not {node.devices_per_node}."
        )


def _check_network(link: Link, wiring: Wiring) -> None:
    if not isinstance(link.bandwidth_bytes_per_s, int | float) or not link.bandwidth_bytes_per_s > 0:
        raise TopologyError(
            f"A network with bytes_per_s_per_device={link.bandwidth_bytes_per_s!r}; it must be a positive number."
        )
    if wiring.devices_per_nic < 1 or wiring.nodes_per_pod < 0 or wiring.oversubscription < 1:
        raise TopologyError(
            f"devices_per_nic={wiring.devices_per_nic!r}, nodes_per_pod={wiring.nodes_per_pod!r}, "
            f"oversubscription={wiring.oversubscription!r}: at least 1, 0 and 1."
        )


def _wiring(file: HardwareFile, prefix: str = "") -> Wiring:
    text = file.texts.get("layout", NodeWiring.SWITCH.value)
    if text not in {layout.value for layout in NodeWiring}:
        raise HardwareFileError(
            f"{file.origin}: layout={text!r} is unknown; use one of {', '.join(layout.value for layout in NodeWiring)}."
        )
    host, cards = f"{prefix}host.", f"{prefix}cards_per_collective"
    return Wiring(
        NodeWiring(text),
        read_link(file, host) if f"{host}bandwidth" in file.constants else None,
        cards_per_collective=file.count(cards, "devices") if cards in file.constants else 0,
    )


def _network_wiring(file: HardwareFile, wiring: Wiring, prefix: str = "") -> Wiring:
    def count(key: str, unit: str, default: int) -> int:
        return file.count(f"{prefix}{key}", unit) if f"{prefix}{key}" in file.constants else default

    ratio = f"{prefix}oversubscription"
    return replace(
        wiring,
        devices_per_nic=count("devices_per_nic", "devices", 1),
        nodes_per_pod=count("nodes_per_pod", "nodes", 0),
        oversubscription=file.number(ratio, "1") if ratio in file.constants else 1.0,
    )


def _cluster_numbers(cluster: Cluster) -> dict[str, tuple[float, str]]:
    node, wiring = cluster.node, cluster.node.wiring
    numbers: dict[str, tuple[float, str]] = {
        "nodes": (cluster.nodes, "nodes"),
        "devices_per_node": (node.devices_per_node, "devices"),
        "used_devices_per_node": (cluster.devices_per_node, "devices"),
        **device_numbers(node.device),
        **link_numbers("intra.", node.intra),
        "intra.cards_per_collective": (wiring.cards_per_collective, "devices"),
        "inter.devices_per_nic": (wiring.devices_per_nic, "devices"),
        "inter.nodes_per_pod": (wiring.nodes_per_pod, "nodes"),
        "inter.oversubscription": (wiring.oversubscription, "1"),
    }
    if wiring.host is not None:
        numbers |= link_numbers("intra.host.", wiring.host)
    if node.host_memory_bytes is not None:
        numbers["host_memory"] = (node.host_memory_bytes, "B")
    return numbers | ({} if node.inter is None else link_numbers("inter.", node.inter))
