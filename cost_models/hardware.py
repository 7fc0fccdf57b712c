"""Hardware: devices, links and clusters, read from sourced data files or measured by `calibration`.

Assumes two levels: devices of a node share a fast fabric (`intra`), nodes a network (`inter`). Ranks are
row-major over the mesh axes, the last axis fastest; with d devices per node, node i holds ranks [i * d, (i + 1) * d).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import networkx

from cost_models import constants
from cost_models.constants import Constant, HardwareFile
from cost_models.errors import TopologyError, UnknownHardwareError
from cost_models.topology import GroupLinks, Link, group_links


@dataclass(frozen=True, slots=True)
class MatmulCurve:
    """How matrix products use a device: `units` processors (SMs) each compute a tile_m x tile_n tile at a time.

    A tile's fill and drain cost as much as `tile_overhead_bytes` more of each row of its operands (k * itemsize).
    Smaller tiles load more per FLOP; `tile_load_share` of that excess is not hidden.
    `efficiency`: by dtype name, the fraction of peak reached in the limit of large sizes (power and issue limits).
    """

    units: int
    tile_m: int
    tile_n: int
    tile_overhead_bytes: float
    tile_load_share: float
    efficiency: Mapping[str, float] = field(hash=False)


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, or the share of a machine that one rank has.

    Args:
        name: name in the data files.
        peak_flops: dense FLOP/s by dtype name: "f64", "f32" (true float32), "tf32" (float32 on tensor cores, only if
            torch.backends.cuda.matmul.allow_tf32), "bf16", "f16", "f8". A dtype that is absent raises when priced.
        memory_bytes: bytes that a program can use.
        memory_bandwidth_bytes_per_s: nominal bandwidth, decimal.
        memory_efficiency: fraction of it that a copy reaches.
        launch_latency_s: time of the smallest operator, added to each one.
        matmul: see `MatmulCurve`.
        attention_efficiency: fraction of peak that fused attention reaches on long sequences.
    """

    name: str
    peak_flops: Mapping[str, float] = field(hash=False)
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    memory_efficiency: float
    launch_latency_s: float
    matmul: MatmulCurve
    attention_efficiency: float

    def peak(self, dtype: str) -> float:
        """Dense peak in FLOP/s for a dtype name. Raises UnknownHardwareError if it is not in the device's file."""
        if dtype not in self.peak_flops:
            raise UnknownHardwareError(
                f"Device {self.name!r} has no peak_flops.{dtype}. Known: {', '.join(self.peak_flops)}. "
                f"Add [peak_flops.{dtype}] with value, unit, source and date to its file."
            )
        return self.peak_flops[dtype]

    def matmul_rate(self, dtype: str) -> float:
        """FLOP/s of large matrix products: peak * efficiency. Raises UnknownHardwareError as `peak` does."""
        peak = self.peak(dtype)
        if dtype not in self.matmul.efficiency:
            raise UnknownHardwareError(
                f"Device {self.name!r} has no matmul.efficiency.{dtype}. Known: {', '.join(self.matmul.efficiency)}. "
                f"Add [matmul.efficiency.{dtype}] with value, unit, source and date to its file."
            )
        return peak * self.matmul.efficiency[dtype]


@dataclass(frozen=True, slots=True)
class NodeType:
    """A kind of node: its device, how many one node holds, the fabric inside and the network outside."""

    name: str
    device: Device
    devices_per_node: int
    intra: Link
    inter: Link | None


@dataclass(frozen=True, slots=True, init=False)
class Cluster:
    """Nodes of one kind behind a non-blocking network.

    Args:
        node: a node type's name ("h100_sxm") or a `NodeType`.
        nodes: number of nodes.
        devices_per_node: devices used in each; the node type's own number if None.

    Raises:
        UnknownHardwareError: no such node type, or several nodes of a type without a network.
        TopologyError: fewer than one node, or more devices per node than the type has.

    Example:
        >>> Cluster("h100_sxm", nodes=8, devices_per_node=8).size
        64
    """

    node: NodeType
    nodes: int
    devices_per_node: int

    def __init__(self, node: str | NodeType, nodes: int = 1, devices_per_node: int | None = None) -> None:
        kind = node_type(node) if isinstance(node, str) else node
        per_node = kind.devices_per_node if devices_per_node is None else devices_per_node
        _check_shape(kind, nodes, per_node)
        object.__setattr__(self, "node", kind)
        object.__setattr__(self, "nodes", nodes)
        object.__setattr__(self, "devices_per_node", per_node)

    @property
    def device(self) -> Device:
        """The device that every rank has."""
        return self.node.device

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.nodes * self.devices_per_node

    def axis_links(self, mesh_axes: Mapping[str, int]) -> dict[str, GroupLinks]:
        """For each mesh axis, the links that a group along it uses. Raises TopologyError if the mesh is too large."""
        return {axis: self.group_links(mesh_axes, (axis,)) for axis in mesh_axes}

    def group_links(self, mesh_axes: Mapping[str, int], axes: tuple[str, ...]) -> GroupLinks:
        """The links that a group over several axes jointly uses (a reshard over ("data", "model"))."""
        shape = tuple(mesh_axes.items())
        return group_links(shape, axes, self.nodes, self.devices_per_node, self.node.intra, self.node.inter)

    def topology(self) -> networkx.Graph:
        """Devices ("device", rank), node switches ("node", i) and ("network",); edges carry `link`, a `Link`."""
        graph = networkx.Graph()
        for rank in range(self.size):
            graph.add_edge(("device", rank), ("node", rank // self.devices_per_node), link=self.node.intra)
        if self.nodes > 1:
            for index in range(self.nodes):
                graph.add_edge(("node", index), ("network",), link=self.node.inter)
        return graph

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Read a cluster file, as written by `save` or by calibration. Raises HardwareFileError."""
        file = constants.read(Path(path))
        kind = NodeType(
            name=file.text("name"),
            device=_device(file, file.text("device")),
            devices_per_node=int(file.number("devices_per_node", "devices")),
            intra=_link(file, "intra"),
            inter=_link(file, "inter") if "inter.bandwidth" in file.constants else None,
        )
        used = int(file.number("used_devices_per_node", "devices"))
        return cls(kind, nodes=int(file.number("nodes", "nodes")), devices_per_node=used)

    def save(self, path: str | Path, *, source: str, date: str) -> None:
        """Write this cluster as TOML; `source` and `date` (ISO) say where its numbers come from."""
        items = {key: Constant(value, unit, source, date) for key, (value, unit) in _cluster_numbers(self).items()}
        texts = {"name": self.node.name, "device": self.device.name}
        Path(path).write_text(constants.dump(texts, items), encoding="utf-8")


def device(name: str) -> Device:
    """A device of the data files. Raises UnknownHardwareError, naming those known."""
    return _device(constants.load("devices", name), name)


def node_type(name: str) -> NodeType:
    """A node type of the data files. Raises UnknownHardwareError, naming those known."""
    file = constants.load("nodes", name)
    return NodeType(
        name=name,
        device=device(file.text("device")),
        devices_per_node=int(file.number("devices_per_node", "devices")),
        intra=_link(file, "intra"),
        inter=_link(file, "inter") if "inter.bandwidth" in file.constants else None,
    )


def _check_shape(kind: NodeType, nodes: int, per_node: int) -> None:
    if nodes < 1 or per_node < 1 or per_node > kind.devices_per_node:
        raise TopologyError(
            f"Cluster({kind.name!r}, nodes={nodes!r}, devices_per_node={per_node!r}): at least one node, and 1 to "
            f"{kind.devices_per_node} devices in each."
        )
    if nodes > 1 and kind.inter is None:
        raise UnknownHardwareError(
            f"Node type {kind.name!r} has no network, so nodes={nodes!r} cannot be priced; "
            "add the [inter.*] tables to its file."
        )


def _device(file: HardwareFile, name: str) -> Device:
    return Device(
        name=name,
        peak_flops=file.family("peak_flops", "FLOP/s"),
        memory_bytes=int(file.number("memory_bytes", "B")),
        memory_bandwidth_bytes_per_s=file.number("memory_bandwidth", "B/s"),
        memory_efficiency=file.number("memory_efficiency", "1"),
        launch_latency_s=file.number("launch_latency", "s"),
        matmul=MatmulCurve(
            units=int(file.number("matmul.units", "1")),
            tile_m=int(file.number("matmul.tile_m", "1")),
            tile_n=int(file.number("matmul.tile_n", "1")),
            tile_overhead_bytes=file.number("matmul.tile_overhead", "B"),
            tile_load_share=file.number("matmul.tile_load_share", "1"),
            efficiency=file.family("matmul.efficiency", "1"),
        ),
        attention_efficiency=file.number("attention_efficiency", "1"),
    )


_LINK_FIELDS = {  # key in a file: (field of Link, unit)
    "bandwidth": ("bandwidth_bytes_per_s", "B/s"),
    "efficiency": ("efficiency", "1"),
    "in_network_efficiency": ("in_network_efficiency", "1"),
    "latency": ("latency_s", "s"),
    "start": ("start_s", "s"),
    "ramp": ("ramp_bytes", "B"),
    "reduce_scatter_phases": ("reduce_scatter_phases", "1"),
}


def _link(file: HardwareFile, level: str) -> Link:
    return Link(**{name: file.number(f"{level}.{key}", unit) for key, (name, unit) in _LINK_FIELDS.items()})


def _link_numbers(level: str, link: Link) -> dict[str, tuple[float, str]]:
    return {f"{level}.{key}": (getattr(link, name), unit) for key, (name, unit) in _LINK_FIELDS.items()}


def _cluster_numbers(cluster: Cluster) -> dict[str, tuple[float, str]]:
    unit = cluster.device
    numbers: dict[str, tuple[float, str]] = {
        "nodes": (cluster.nodes, "nodes"),
        "devices_per_node": (cluster.node.devices_per_node, "devices"),
        "used_devices_per_node": (cluster.devices_per_node, "devices"),
        **{f"peak_flops.{dtype}": (value, "FLOP/s") for dtype, value in unit.peak_flops.items()},
        "memory_bytes": (unit.memory_bytes, "B"),
        "memory_bandwidth": (unit.memory_bandwidth_bytes_per_s, "B/s"),
        "memory_efficiency": (unit.memory_efficiency, "1"),
        "launch_latency": (unit.launch_latency_s, "s"),
        "matmul.units": (unit.matmul.units, "1"),
        "matmul.tile_m": (unit.matmul.tile_m, "1"),
        "matmul.tile_n": (unit.matmul.tile_n, "1"),
        "matmul.tile_overhead": (unit.matmul.tile_overhead_bytes, "B"),
        "matmul.tile_load_share": (unit.matmul.tile_load_share, "1"),
        **{f"matmul.efficiency.{dtype}": (value, "1") for dtype, value in unit.matmul.efficiency.items()},
        "attention_efficiency": (unit.attention_efficiency, "1"),
        **_link_numbers("intra", cluster.node.intra),
    }
    return numbers | ({} if cluster.node.inter is None else _link_numbers("inter", cluster.node.inter))
