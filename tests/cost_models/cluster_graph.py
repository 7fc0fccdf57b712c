"""A cluster as a networkx graph, and the bandwidth of traffic routed over the graph.

Nodes of the graph: ("device", rank), ("switch", node), ("host", node), ("card", node, i), ("leaf", pod),
("spine",). Edges carry `bytes_per_s`, the bandwidth of long transfers in each direction. `topology.group_links`
computes the same bandwidth by formulas, and the graph routes every ring for any placement.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise

import networkx

from cost_models.hardware import Cluster
from cost_models.topology import GroupLinks, Link, NodeWiring, Wiring, direct_links


def axis_links(cluster: Cluster, mesh_axes: Mapping[str, int]) -> dict[str, GroupLinks]:
    """Return, for each mesh axis, the links of a group along the axis."""
    return {axis: cluster.group_links(mesh_axes, (axis,)) for axis in mesh_axes}


def cluster_graph(cluster: Cluster) -> networkx.Graph:
    """Devices, switches, network cards, pods and spine as a graph."""
    node = cluster.node
    return _build_graph(
        cluster.nodes, cluster.devices_per_node, node.intra, node.inter, node.wiring, node.devices_per_node
    )


def _build_graph(
    nodes: int, per_node: int, intra: Link, inter: Link | None, wiring: Wiring, wired_devices: int
) -> networkx.Graph:
    """Return the graph of `nodes` nodes with `per_node` of their `wired_devices` devices each."""
    graph = networkx.Graph()
    for rank in range(nodes * per_node):
        graph.add_node(("device", rank))
    for node in range(nodes):
        _add_fabric(graph, node, per_node, intra, wiring, wired_devices)
        if nodes > 1 and inter is not None:
            _add_cards(graph, node, per_node, inter, wiring)
    if nodes > 1 and inter is not None and wiring.nodes_per_pod:
        pod_bytes = inter.reached_bytes_per_s * per_node * wiring.nodes_per_pod / wiring.oversubscription
        for pod in range(-(-nodes // wiring.nodes_per_pod)):
            graph.add_edge(("leaf", pod), ("spine",), bytes_per_s=pod_bytes)
    return graph


def _add_fabric(
    graph: networkx.Graph, node: int, per_node: int, intra: Link, wiring: Wiring, wired_devices: int
) -> None:
    first = node * per_node
    for (a, b), share in direct_links(wiring.layout, wired_devices).items():
        if b < per_node:
            edge = ("device", first + a), ("device", first + b)
            graph.add_edge(*edge, bytes_per_s=share * intra.reached_bytes_per_s)
    for place in range(per_node):
        if wiring.layout is NodeWiring.SWITCH:
            graph.add_edge(("device", first + place), ("switch", node), bytes_per_s=intra.reached_bytes_per_s)
        elif wiring.host is not None:
            bus = wiring.host.reached_bytes_per_s
            graph.add_edge(("device", first + place), ("host", node), bytes_per_s=bus)


def _add_cards(graph: networkx.Graph, node: int, per_node: int, inter: Link, wiring: Wiring) -> None:
    card_bytes = inter.reached_bytes_per_s * wiring.devices_per_nic
    top = ("leaf", node // wiring.nodes_per_pod) if wiring.nodes_per_pod else ("spine",)
    for place in range(per_node):
        card = ("card", node, place // wiring.devices_per_nic)
        graph.add_edge(("device", node * per_node + place), card, bytes_per_s=card_bytes)
        graph.add_edge(card, top, bytes_per_s=card_bytes)


def ring_bandwidth(graph: networkx.Graph, groups: Sequence[Sequence[int]], per_node: int) -> float:
    """Return the bandwidth in B/s at which each of `groups` (of ranks) runs rings when all groups run at once.

    1. A group with p members in each of its nodes runs p rings, each through all members, node by node. Ring j leaves
       and enters nodes at its j-th member, so that all cards are used. Each ring carries 1/p of the bytes.
    2. A step inside a node takes the direct link or the switch. A step between nodes takes the cards of its devices.
    3. With l the bytes on an edge in one direction for every byte of a group's ring, the edge allows bytes_per_s / l.
       The least value over all edges holds.

    Groups need the same number of members in each of their nodes. Rings do not spread over direct links that only some
    rings of a node could use. The result is therefore the bandwidth of single rings on nodes without a switch.
    """
    load: defaultdict[tuple[Hashable, Hashable], float] = defaultdict(float)
    for group in groups:
        rings = _rings(sorted(group), per_node)
        for ring in rings:
            for source, target in pairwise([*ring, ring[0]]):
                for edge in _route(graph, source, target, per_node):
                    load[edge] += 1 / len(rings)
    return min(graph.edges[edge]["bytes_per_s"] / amount for edge, amount in load.items())


def _rings(ranks: Sequence[int], per_node: int) -> list[list[int]]:
    by_node: dict[int, list[int]] = {}
    for rank in ranks:
        by_node.setdefault(rank // per_node, []).append(rank)
    members = len(next(iter(by_node.values())))
    rings = []
    for turn in range(members):
        rings.append([part[(turn + step) % members] for part in by_node.values() for step in range(members)])
    return rings


def _route(graph: networkx.Graph, source: int, target: int, per_node: int) -> list[tuple[Hashable, Hashable]]:
    """Return the directed edges between two devices, never through a third device."""
    others = {("device", rank) for rank in (source, target)}
    inside = source // per_node == target // per_node

    def passable(node: tuple) -> bool:
        if node[0] == "device":
            return node in others
        return node[0] in {"switch", "host"} if inside else node[0] not in {"switch", "host"}

    path = networkx.shortest_path(
        networkx.subgraph_view(graph, filter_node=passable), ("device", source), ("device", target)
    )
    return list(pairwise(path))
