"""Links, the wiring of devices, and the links of a group of ranks.

Links have three levels. Devices of a node share a fabric (`intra`), nodes share a network (`inter`), and pods of nodes
share a spine that may be oversubscribed. All groups along an axis communicate at once (SPMD). So a group's bandwidth
at a node is its members there times the share of one device. Without a switch, it is the bandwidth of the group's
narrowest cut. This is the bound on all-gather, which trees reach (Zhao et al. 2024, "ForestColl", section 3).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache
from itertools import combinations, product

from cost_models.errors import TopologyError, UnknownHardwareError


@dataclass(frozen=True, slots=True)
class Link:
    """A link, from the view of one device.

    Args:
        bandwidth_bytes_per_s: nominal bandwidth of a device in each direction; on a network, the device's share of its
            node's cards.
        efficiency: fraction of the bandwidth that long transfers reach.
        in_network_efficiency: the same fraction for all-reduce inside the switch (NVLS); 0 if the switch cannot reduce.
        latency_s: seconds for each hop of an algorithm, with the protocol for long messages (NCCL's Simple).
        start_s: seconds for each phase of a collective, for any group.
        ramp_bytes: the bytes r of the ramp in `collectives`. The larger the number, the more slowly bandwidth saturates
            with size; with 0 it is full at any size.
        reduce_scatter_phases: ring phases that a reduce-scatter takes. NCCL takes 1. A library that slices an
            all-reduce takes about 2 (Gloo).
        protocols: protocols for short messages, if the library has any (NCCL's LL and LL128).
        measured: measured times of collectives. They alone price these collectives within a node (Gloo on a CPU).
    """

    bandwidth_bytes_per_s: float
    efficiency: float
    in_network_efficiency: float
    latency_s: float
    start_s: float
    ramp_bytes: float
    reduce_scatter_phases: float
    protocols: tuple[Protocol, ...] = ()
    measured: tuple[MeasuredCollective, ...] = ()

    @property
    def reached_bytes_per_s(self) -> float:
        """Bandwidth of long transfers, in B/s."""
        return self.bandwidth_bytes_per_s * self.efficiency

    @property
    def numbers(self) -> tuple[float, ...]:
        """Numbers that tell most links apart, for the hash of `GroupLinks`."""
        short = (number for each in self.protocols for number in (each.start_s, each.latency_s))
        speeds = (self.bandwidth_bytes_per_s, self.efficiency, self.in_network_efficiency, self.ramp_bytes)
        return (*speeds, self.start_s, self.latency_s, *short)

    def slowed(self, factor: float) -> Link:
        """Return the link with the modelled times of collectives multiplied by `factor`.

        Measured times (`measured`) stay as they are.
        """
        short = tuple(
            replace(each, latency_s=each.latency_s * factor, start_s=each.start_s * factor) for each in self.protocols
        )
        latency_s, start_s = self.latency_s * factor, self.start_s * factor
        return replace(self.scaled(1 / factor), latency_s=latency_s, start_s=start_s, protocols=short)

    def scaled(self, factor: float) -> Link:
        """Return the link with its bandwidth multiplied by `factor`."""
        return replace(self, bandwidth_bytes_per_s=self.bandwidth_bytes_per_s * factor)


@dataclass(frozen=True, slots=True)
class Protocol:
    """A protocol for short messages: flags travel with the data, so hops are short and part of the bandwidth is lost.

    Args:
        name: "LL" (8-byte lines, half of them flags) or "LL128" (120 bytes of data in each 128).
        bandwidth_share: fraction of the link's reached bandwidth that is left.
        latency_s: seconds for each hop.
        start_s: seconds for each phase of a collective.
    """

    name: str
    bandwidth_share: float
    latency_s: float
    start_s: float


@dataclass(frozen=True, slots=True)
class MeasuredCollective:
    """Measured times of one collective on one link.

    A collective of n ranks takes start + (n - 1) * latency + (n - 1)/n * bytes / bandwidth seconds.

    Args:
        name: "all_reduce", "all_gather", "reduce_scatter" or "all_to_all". `collectives` says which bytes count.
        start_s: seconds that any number of ranks takes.
        latency_s: further seconds for each rank but the first.
        bandwidth_bytes_per_s: bandwidth of all phases of the collective together.
    """

    name: str
    start_s: float
    latency_s: float
    bandwidth_bytes_per_s: float

    def seconds(self, full_bytes: float, members: int) -> float:
        """Return the seconds of the collective on `full_bytes` bytes in a group of `members` members."""
        carried = (members - 1) / members * full_bytes
        return self.start_s + (members - 1) * self.latency_s + carried / self.bandwidth_bytes_per_s


class NodeWiring(Enum):
    """Direct connections between the devices of a node."""

    SWITCH = "switch"  # every device to every other device at full bandwidth (NVSwitch)
    MESH = "mesh"  # a direct link to each other device, all sharing the bandwidth (Infinity Fabric, 4 x V100)
    HYBRID_CUBE_MESH = "hybrid_cube_mesh"  # DGX-1: 8 devices with 6 links each, not all of them neighbours
    PAIRS = "pairs"  # bridges between devices 2i and 2i + 1; everything else over the host's bus
    HOST = "host"  # the host's bus only (PCIe)


@dataclass(frozen=True, slots=True)
class Wiring:
    """Links and network cards that the devices of a node share.

    Args:
        layout: direct connections. The node's `intra` link counts all direct links of a device together.
        host: the host's bus, for pairs without a direct link; None if every pair has a direct link.
        devices_per_nic: number of devices that share one network card. A device that is alone on a node has the whole
            card.
        nodes_per_pod: number of nodes below one leaf of the network, with full bandwidth among them; 0 for all nodes.
        oversubscription: bandwidth of a pod's cards divided by the bandwidth of its uplink to the spine.
        cards_per_collective: number of devices of a node whose network cards one ring or tree uses at once; 0 for all.
    """

    layout: NodeWiring = NodeWiring.SWITCH
    host: Link | None = None
    devices_per_nic: int = 1
    nodes_per_pod: int = 0
    oversubscription: float = 1.0
    cards_per_collective: int = 0


SWITCHED = Wiring()

# NVLinks by pair of devices, `nvidia-smi topo -m` of a DGX-1V or p3.16xlarge: each device has six.
_CUBE = (
    *((0, 1, 1), (0, 2, 1), (0, 3, 2), (1, 2, 2), (1, 3, 1), (2, 3, 2)),
    *((4, 5, 1), (4, 6, 1), (4, 7, 2), (5, 6, 2), (5, 7, 1), (6, 7, 2)),
    *((0, 4, 2), (1, 5, 2), (2, 6, 1), (3, 7, 1)),
)


def direct_links(layout: NodeWiring, devices: int) -> dict[tuple[int, int], float]:
    """Return the direct links of a node: pair of devices, smaller number first, to a share of a device's bandwidth."""
    pairs = list(combinations(range(devices), 2))
    match layout:
        case NodeWiring.MESH:
            return dict.fromkeys(pairs, 1 / max(1, devices - 1))
        case NodeWiring.HYBRID_CUBE_MESH:
            return {(a, b): links / 6 for a, b, links in _CUBE if b < devices}
        case NodeWiring.PAIRS:
            return {(a, b): 1.0 for a, b in pairs if a % 2 == 0 and b == a + 1}
    return {}


@lru_cache(maxsize=4096)
def wired_share(layout: NodeWiring, devices: int, members: tuple[int, ...]) -> float:
    """Return the share of a device's bandwidth that a group of devices of one node reaches, or 0 if no links join it.

    Let g be the number of members, S a proper subset of them, and B(S) the bandwidth of the links that leave S. An
    all-gather sends at least |S|/g of its bytes over these links. So the group is as fast as a ring whose links have
    the least (g - 1) * B(S) / |S| over all S.
    """
    if layout is NodeWiring.SWITCH or len(members) == 1:
        return 1.0
    if layout is NodeWiring.MESH:  # the cut of one member from all others
        return (len(members) - 1) / (devices - 1)
    links = direct_links(layout, devices)
    if layout is not NodeWiring.HYBRID_CUBE_MESH:
        return links.get((members[0], members[1]), 0.0) if len(members) == 2 else 0.0
    return narrowest_cut(links, members)


def narrowest_cut(links: Mapping[tuple[int, int], float], members: Sequence[int]) -> float:
    """Return the least (g - 1) * B(S) / |S| of `wired_share`, at most 1, by a look at all subsets of the members."""
    joined = {pair: share for pair, share in links.items() if pair[0] in members and pair[1] in members}
    least = math.inf
    for size in range(1, len(members)):
        for subset in combinations(members, size):
            leaving = sum(share for (a, b), share in joined.items() if (a in subset) != (b in subset))
            least = min(least, (len(members) - 1) * leaving / size)
    return min(1.0, least)


@dataclass(frozen=True, slots=True)
class GroupLinks:
    """The links of a group of ranks.

    A group with uneven numbers of ranks per node counts as a flat ring over the network, with one member per node. This
    is pessimistic.

    Args:
        intra: the fabric in a node; None unless per_node > 1.
        inter: the network; None unless nodes > 1.
        pods: number of pods that the group spans.
        spine: a device's share of the spine if all traffic leaves the pod. None unless the group spans several pods
            with an oversubscribed uplink.
        cards: number of members in each node whose network cards a ring or tree uses; 0 for all.
    """

    size: int
    per_node: int
    nodes: int
    intra: Link | None
    inter: Link | None
    pods: int = 1
    spine: Link | None = None
    cards: int = 0
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Compute the hash once, because prices are often looked up by group. The hash is equal in every process."""
        numbers = tuple(number for link in self.links for number in link.numbers)
        object.__setattr__(self, "_hash", hash((self.size, self.per_node, self.nodes, self.pods, self.cards, numbers)))

    def __hash__(self) -> int:
        return self._hash

    def measured(self, collective: str) -> MeasuredCollective | None:
        """Return the measured times of a collective in a group within one node, or None without a measurement."""
        if self.nodes > 1 or self.intra is None:
            return None
        return next((each for each in self.intra.measured if each.name == collective), None)

    @property
    def used_cards(self) -> int:
        """Number of members in each node whose network cards a ring or tree uses."""
        return min(self.per_node, self.cards) if self.cards else self.per_node

    @property
    def links(self) -> tuple[Link, ...]:
        """The links that the group uses, innermost first: fabric, network, spine."""
        return tuple(link for link in (self.intra, self.inter, self.spine) if link is not None)


@lru_cache(maxsize=4096)
def group_links(
    shape: tuple[tuple[str, int], ...],
    axes: tuple[str, ...],
    nodes: int,
    devices_per_node: int,
    intra: Link,
    inter: Link | None,
    wiring: Wiring = SWITCHED,
    wired_devices: int = 0,
) -> GroupLinks:
    """Return the links of a group over `axes` of a row-major mesh, on nodes of contiguous ranks.

    1. List the ranks of every group. The members of a group differ only in their coordinates along `axes`.
    2. Count each group's members in each node. If all counts are equal, the group has per_node members in each of its
       nodes. Otherwise it counts as a flat ring over the network. Members in each pod are counted in the same way.
    3. Within nodes, the slowest group decides. Its link is its share of the direct links, or the host's bus.

    Args:
        shape: name and size of each mesh axis, outermost first.
        wired_devices: number of devices in a complete node, which the layout is for; 0 for `devices_per_node`.

    Raises:
        TopologyError: an axis is unknown, or the mesh is larger than the cluster.
        UnknownHardwareError: the group needs a network, but the node type has no numbers for it.
    """
    _check_mesh(shape, axes, nodes * devices_per_node)
    size = math.prod(extent for name, extent in shape if name in axes)
    groups = _groups(shape, axes)
    per_node, touched = _common_profile(groups, devices_per_node)
    if per_node == 0:
        per_node, touched = 1, size
    if touched > 1 and inter is None:
        raise UnknownHardwareError(
            f"A group over {axes!r} spans {touched} nodes, but the node type has no [inter.*] numbers."
        )
    inside = _inside(groups, devices_per_node, intra, wiring, wired_devices) if per_node > 1 else None
    if touched == 1 or inter is None:
        return GroupLinks(size, per_node, touched, inside, None)
    used = min(devices_per_node, math.prod(extent for _, extent in shape))
    card = inter.scaled(wiring.devices_per_nic / min(used, wiring.devices_per_nic))
    pods, spine = _spine(groups, devices_per_node, touched, card, wiring)
    return GroupLinks(size, per_node, touched, inside, card, pods, spine, wiring.cards_per_collective)


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


def _common_profile(groups: Sequence[Sequence[int]], unit: int) -> tuple[int, int]:
    """Return (members in each unit, number of units) of all groups; (0, 0) if these numbers differ.

    A unit is a node or a pod, of `unit` consecutive ranks.
    """
    profiles = {_profile(group, unit) for group in groups}
    return profiles.pop() if len(profiles) == 1 else (0, 0)


def _profile(ranks: Sequence[int], unit: int) -> tuple[int, int]:
    """Return (members in each unit, number of units) of one group; (0, 0) if units have different numbers of members.

    A unit is a node or a pod, of `unit` consecutive ranks.
    """
    counts = Counter(rank // unit for rank in ranks)
    different = set(counts.values())
    return (different.pop(), len(counts)) if len(different) == 1 else (0, 0)


def _inside(groups: Sequence[Sequence[int]], per_node: int, intra: Link, wiring: Wiring, wired: int) -> Link:
    """Return the link of the slowest group in a node: its share of direct links, or the host's bus if that is faster.

    Raises `UnknownHardwareError` if a group has no direct links and the node has no host bus.
    """
    if wiring.layout is NodeWiring.SWITCH:
        return intra
    parts = {part for group in groups for part in _parts(group, per_node)}
    share = min(wired_share(wiring.layout, wired or per_node, part) for part in parts)
    direct = intra.scaled(share) if share > 0 else None
    if direct is not None and (wiring.host is None or direct.reached_bytes_per_s >= wiring.host.reached_bytes_per_s):
        return direct
    if wiring.host is None:
        raise UnknownHardwareError(
            f"No direct link joins the devices {sorted(parts)} of a node wired as {wiring.layout.value!r}, and the "
            "node type has no host bus. Add the [host.*] tables to its file."
        )
    return wiring.host


def _parts(ranks: Sequence[int], per_node: int) -> set[tuple[int, ...]]:
    """Return the sets of devices that a group uses in its nodes, each as indices in the node. Equal sets count once."""
    found: dict[int, list[int]] = {}
    for rank in ranks:
        found.setdefault(rank // per_node, []).append(rank % per_node)
    return {tuple(sorted(places)) for places in found.values()}


def _spine(
    groups: Sequence[Sequence[int]], per_node: int, touched: int, card: Link, wiring: Wiring
) -> tuple[int, Link | None]:
    """Return the number of pods that a group spans, and a device's share of the uplink to the spine.

    The result is (1, None) for nodes without pods, and for a group in one pod. It is also (1, None) if the uplink has
    the bandwidth of all network cards of a pod. If pods or groups have different numbers of members, the number of pods
    is not known. Then `touched`, the number of nodes of a group, is returned in its place.
    """
    if wiring.nodes_per_pod == 0 or wiring.oversubscription <= 1:
        return 1, None
    members, pods = _common_profile(groups, per_node * wiring.nodes_per_pod)
    if members == 0:
        pods = touched
    if pods == 1:
        return 1, None
    narrow = card.scaled(1 / wiring.oversubscription)
    return pods, replace(narrow, ramp_bytes=card.ramp_bytes / wiring.oversubscription)
