"""Links, and which of them a group of ranks uses.

A group of n ranks that spans `nodes` nodes with `per_node` members in each is two-level: n = per_node * nodes.
All groups along an axis communicate at once (SPMD), so each member owns its own share of the node's network:
the group's network bandwidth per node is per_node * inter.bandwidth_bytes_per_s, never the whole node's.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from cost_models.errors import TopologyError, UnknownHardwareError


@dataclass(frozen=True, slots=True)
class Link:
    """A link, as one device sees it.

    Args:
        bandwidth_bytes_per_s: nominal, per device and direction (a device's share of its node's network cards).
        efficiency: fraction of it that long transfers reach.
        in_network_efficiency: the same for all-reduce inside the switch (NVLS); 0 if the switch cannot reduce.
        latency_s: per step of an algorithm (hop).
        start_s: per collective, whatever the group.
        ramp_bytes: message size that scales how slowly bandwidth saturates (see `collectives`); 0 = at once.
        reduce_scatter_phases: ring phases that a reduce-scatter takes: 1 (NCCL), about 2 where the library does it as
            an all-reduce and a slice (Gloo).
    """

    bandwidth_bytes_per_s: float
    efficiency: float
    in_network_efficiency: float
    latency_s: float
    start_s: float
    ramp_bytes: float
    reduce_scatter_phases: float

    @property
    def reached_bytes_per_s(self) -> float:
        """Bandwidth that long transfers reach, in B/s."""
        return self.bandwidth_bytes_per_s * self.efficiency


@dataclass(frozen=True, slots=True)
class GroupLinks:
    """What a group of `size` ranks communicates over: `per_node` members in each of `nodes` nodes.

    `intra` is None unless per_node > 1, `inter` is None unless nodes > 1. A group with an uneven share of
    ranks per node counts as one member per node: a flat ring over the network, the slower of the two readings.
    """

    size: int
    per_node: int
    nodes: int
    intra: Link | None
    inter: Link | None


@lru_cache(maxsize=4096)
def group_links(
    shape: tuple[tuple[str, int], ...],
    axes: tuple[str, ...],
    nodes: int,
    devices_per_node: int,
    intra: Link,
    inter: Link | None,
) -> GroupLinks:
    """The links of a group over `axes` of a row-major mesh `shape` on nodes of contiguous ranks.

    1. The members of a group differ only in the coordinates of `axes`; list the ranks of every group.
    2. Count each group's members per node. If every group has the same count in each node that it touches, it is
       per_node x nodes; else it is taken as a flat ring over the network.

    Raises:
        TopologyError: an unknown axis, or a mesh larger than the cluster.
        UnknownHardwareError: the group needs a network that the node type has no numbers for.
    """
    _check_mesh(shape, axes, nodes * devices_per_node)
    size = math.prod(extent for name, extent in shape if name in axes)
    profiles = {_profile(group, devices_per_node) for group in _groups(shape, axes)}
    per_node, touched = profiles.pop() if len(profiles) == 1 else (0, 0)
    if per_node == 0:
        per_node, touched = 1, size
    if touched > 1 and inter is None:
        raise UnknownHardwareError(
            f"A group over {axes!r} spans {touched} nodes, but the node type has no [inter.*] numbers."
        )
    return GroupLinks(size, per_node, touched, intra if per_node > 1 else None, inter if touched > 1 else None)


def _check_mesh(shape: tuple[tuple[str, int], ...], axes: tuple[str, ...], devices: int) -> None:
    names = [name for name, _ in shape]
    unknown = [axis for axis in axes if axis not in names]
    if unknown:
        raise TopologyError(f"Mesh {dict(shape)} has no axis {unknown[0]!r}.")
    if math.prod(extent for _, extent in shape) > devices:
        raise TopologyError(f"Mesh {dict(shape)} needs more ranks than the cluster's {devices} devices.")


def _groups(shape: tuple[tuple[str, int], ...], axes: tuple[str, ...]) -> list[list[int]]:
    inside, outside, stride = [0], [0], 1
    for name, extent in reversed(shape):
        steps = [index * stride for index in range(extent)]
        if name in axes:
            inside = [base + step for base, step in product(inside, steps)]
        else:
            outside = [base + step for base, step in product(outside, steps)]
        stride *= extent
    return [[base + step for step in inside] for base in outside]


def _profile(ranks: list[int], devices_per_node: int) -> tuple[int, int]:
    """(members per node, nodes touched), or (0, 0) when nodes hold different numbers of members."""
    counts = Counter(rank // devices_per_node for rank in ranks)
    different = set(counts.values())
    return (different.pop(), len(counts)) if len(different) == 1 else (0, 0)
