"""Links of groups on a cluster, compared with rings routed over its graph."""

import dataclasses
from collections import Counter
from itertools import combinations
from math import prod

import networkx
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cost_models.collectives import all_gather_time, all_reduce_time, all_to_all_time
from cost_models.errors import TopologyError, UnknownHardwareError
from cost_models.hardware import Cluster, node_type
from cost_models.step import ALONE
from cost_models.topology import NodeWiring, direct_links, wired_share
from tests.cost_models.cluster_graph import axis_links, cluster_graph, ring_bandwidth

MESHES = st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=3).filter(lambda sizes: prod(sizes) <= 64)


def cluster(nodes: int, per_node: int, **network) -> Cluster:
    kind = node_type("h100_sxm").with_network(**network) if network else node_type("h100_sxm")
    return Cluster(kind, nodes=nodes, devices_per_node=per_node)


def groups_along(mesh: dict[str, int], axis: str) -> list[list[int]]:
    """Return the ranks of every group along an axis of a row-major mesh."""
    names, total = list(mesh), prod(mesh.values())
    stride = prod(mesh[name] for name in names[names.index(axis) + 1 :])
    found: dict[int, list[int]] = {}
    for rank in range(total):
        found.setdefault(rank - rank // stride % mesh[axis] * stride, []).append(rank)
    return list(found.values())


def is_even(groups: list[list[int]], unit: int) -> bool:
    """Whether all groups have equally many members in each of their units of ranks."""
    counts = [Counter(rank // unit for rank in group) for group in groups]
    return len({(len(count), tuple(sorted(set(count.values())))) for count in counts}) == 1 and all(
        len(set(count.values())) == 1 for count in counts
    )


def slowest_ring(links) -> float:
    """Return the bandwidth of a ring over a group, by `GroupLinks`: the least of its levels, shared among members."""
    inside = [links.intra.reached_bytes_per_s] if links.intra else []
    outside = [links.per_node * links.inter.reached_bytes_per_s] if links.inter else []
    spine = [links.size / links.pods * links.spine.reached_bytes_per_s] if links.spine else []
    return min([*inside, *outside, *spine])


def test_devices_are_on_the_switch_of_their_own_node():
    """In a graph of two nodes with three devices each, devices 3, 4 and 5 are on the second node's switch."""
    graph = cluster_graph(cluster(2, 3))
    for node, ranks in enumerate([(0, 1, 2), (3, 4, 5)]):
        assert set(graph["switch", node]) == {("device", rank) for rank in ranks}


@given(MESHES, st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2]), st.sampled_from([(0, 1.0), (2, 2.0), (4, 3.0)]))
def test_bandwidth_equals_what_routing_every_ring_gives(sizes, per_node, devices_per_nic, pods):
    """The formulas' bandwidth equals that of routed rings for each axis of a mesh, with shared cards and slow
    spines.

    If groups have uneven shares of the pods, the formulas' bandwidth is at most the routed one.
    """
    assume(prod(sizes) % per_node == 0)
    nodes = prod(sizes) // per_node
    nodes_per_pod, oversubscription = pods
    assume(nodes_per_pod == 0 or nodes % nodes_per_pod == 0)
    kind = node_type("h100_sxm").with_network(
        devices_per_nic=devices_per_nic, nodes_per_pod=nodes_per_pod, oversubscription=oversubscription
    )
    machine = Cluster(kind, nodes, per_node, ALONE)
    mesh = {f"axis{index}": size for index, size in enumerate(sizes)}
    assume(per_node % devices_per_nic == 0)
    links_of = {axis: links for axis, links in axis_links(machine, mesh).items() if links.size > 1}
    assume(links_of)
    for axis, links in links_of.items():
        groups = groups_along(mesh, axis)
        members = {len({rank // per_node for rank in group}) * links.per_node for group in groups}
        if members != {links.size}:
            continue
        routed = ring_bandwidth(cluster_graph(machine), groups, per_node)
        if nodes_per_pod and not is_even(groups, per_node * nodes_per_pod):
            assert slowest_ring(links) <= routed * (1 + 1e-9)
        else:
            assert slowest_ring(links) == pytest.approx(routed)


def test_an_axis_of_stride_eight_crosses_nodes():
    """An axis over nodes of eight has one member in each of 16 nodes, and the inner axis lies within a node."""
    links = axis_links(cluster(16, 8), {"data": 16, "model": 8})
    assert (links["data"].per_node, links["data"].nodes) == (1, 16)
    assert (links["model"].per_node, links["model"].nodes) == (8, 1)


def test_a_lone_device_has_the_whole_card():
    """Two devices share a card of 400 Gbit/s, and a device alone on its node has the whole card."""
    kind = node_type("h100_sxm").with_network(bytes_per_s_per_device=25e9, devices_per_nic=2)
    pairs = Cluster(kind, 2, 2, ALONE).group_links({"a": 2, "b": 2}, ("a",))
    alone = Cluster(kind, 2, 1, ALONE).group_links({"a": 2}, ("a",))
    assert (pairs.inter.bandwidth_bytes_per_s, alone.inter.bandwidth_bytes_per_s) == (25e9, 50e9)


def test_a_contiguous_ring_barely_feels_an_oversubscribed_spine():
    """An oversubscribed spine slows an all-to-all over all nodes, but not a ring, which leaves each pod once."""
    full, narrow = cluster(8, 8), cluster(8, 8, nodes_per_pod=4, oversubscription=4.0)
    links, narrowed = (machine.group_links({"a": 64}, ("a",)) for machine in (full, narrow))
    assert narrowed.pods == 2
    assert all_gather_time(1e9, narrowed) == pytest.approx(all_gather_time(1e9, links))
    assert all_to_all_time(1e9, narrowed) > 1.5 * all_to_all_time(1e9, links)


def test_a_ring_across_pods_feels_the_spine():
    """For groups of two ranks in two pods, a spine oversubscribed by 4 takes over three times as long."""
    full, narrow = cluster(8, 8), cluster(8, 8, nodes_per_pod=4, oversubscription=4.0)
    links, narrowed = (machine.group_links({"a": 2, "b": 32}, ("a",)) for machine in (full, narrow))
    assert all_gather_time(1e9, narrowed) > 3 * all_gather_time(1e9, links)


@given(st.sampled_from(["inter", "intra"]), st.floats(1, 10), st.sampled_from([8, 16, 32]), st.floats(1, 1e10))
def test_adding_a_faster_link_never_slows(level, factor, size, message):
    """A faster link, in the node or between nodes, never slows an axis across both."""
    kind = node_type("h100_sxm")
    faster = dataclasses.replace(kind, **{level: getattr(kind, level).scaled(factor)})
    times = [
        all_reduce_time(message, Cluster(each, nodes=4).group_links({"a": size, "b": 32 // size}, ("a",)))
        for each in (kind, faster)
    ]
    assert times[1] <= times[0] * (1 + 1e-12)


def test_a_hybrid_cube_mesh_has_six_links_a_device():
    """In the cube mesh, all eight devices together have full bandwidth, and a quad two thirds of it.

    Devices 0 and 3 have one third, and devices 0 and 5 have no link.
    """
    links = direct_links(NodeWiring.HYBRID_CUBE_MESH, 8)
    for device in range(8):
        assert sum(share for pair, share in links.items() if device in pair) == pytest.approx(1)
    assert wired_share(NodeWiring.HYBRID_CUBE_MESH, 8, tuple(range(8))) == pytest.approx(1)
    assert wired_share(NodeWiring.HYBRID_CUBE_MESH, 8, (0, 1, 2, 3)) == pytest.approx(4 / 6)
    assert wired_share(NodeWiring.HYBRID_CUBE_MESH, 8, (0, 3)) == pytest.approx(2 / 6)
    assert wired_share(NodeWiring.HYBRID_CUBE_MESH, 8, (0, 5)) == 0


@given(st.integers(2, 8), st.data())
def test_a_group_on_a_mesh_has_the_links_to_its_members(devices, data):
    """A group of g out of n fully joined devices uses (g - 1) / (n - 1) of the links."""
    members = data.draw(st.sampled_from([m for g in range(2, devices + 1) for m in combinations(range(devices), g)]))
    assert wired_share(NodeWiring.MESH, devices, members) == pytest.approx((len(members) - 1) / (devices - 1))


@pytest.mark.parametrize(("layout", "share"), [(NodeWiring.MESH, 1.0), (NodeWiring.PAIRS, 0.0), (NodeWiring.HOST, 0.0)])
def test_large_nodes_have_a_share_at_once(layout, share):
    """For 64 devices the share of links is found without trying their subsets."""
    assert wired_share(layout, 64, tuple(range(64))) == share


@given(st.sampled_from([NodeWiring.MESH, NodeWiring.HYBRID_CUBE_MESH, NodeWiring.PAIRS]), st.integers(2, 8), st.data())
def test_the_narrowest_cut_equals_that_of_the_graph(layout, devices, data):
    """The share of links of a group equals the largest rate at which maximum flows reach all its members."""
    members = data.draw(st.sampled_from([m for g in range(2, devices + 1) for m in combinations(range(devices), g)]))
    graph = networkx.DiGraph()
    graph.add_nodes_from([*members, "source"])
    for (a, b), share in direct_links(layout, devices).items():
        if a in members and b in members:
            graph.add_edge(a, b, capacity=share)
            graph.add_edge(b, a, capacity=share)

    def feeds_all(rate: float) -> bool:
        for member in members:
            graph.add_edge("source", member, capacity=rate)
        return all(
            networkx.maximum_flow_value(graph, "source", member) >= rate * len(members) - 1e-9 for member in members
        )

    found = wired_share(layout, devices, members)
    rate = found / (len(members) - 1)  # each member sends its own part at this rate to all others
    assert feeds_all(rate) if found > 0 else True
    if found < 1:
        assert not feeds_all(rate * 1.01 + 1e-6)


def test_bridged_pairs_fall_back_to_the_bus():
    """Two bridged cards have their bridge's bandwidth, and four cards the host bus."""
    machine = Cluster("a100_pcie_80gb")
    pair, four = (machine.group_links({"a": 8 // size, "b": size}, ("b",)).intra for size in (2, 4))
    assert pair.bandwidth_bytes_per_s == 300e9
    assert four == machine.node.wiring.host


def test_devices_without_any_path_raise():
    """If neither a link nor a host bus joins two devices of a cube mesh, `group_links` raises."""
    kind = node_type("dgx1_v100")
    alone = dataclasses.replace(kind, wiring=dataclasses.replace(kind.wiring, host=None))
    with pytest.raises(UnknownHardwareError, match=r"\[host\.\*\]"):
        Cluster(alone, devices_per_node=6).group_links({"a": 2, "b": 3}, ("a",))


def test_graph_of_a_mesh_has_direct_links():
    """Eight MI300X have 28 direct links in each node, and the graph of two nodes is connected."""
    graph = cluster_graph(Cluster("mi300x", nodes=2))
    direct = [edge for edge in graph.edges if edge[0][0] == edge[1][0] == "device"]
    assert len(direct) == 2 * 28
    assert networkx.is_connected(graph)


def test_networks_are_checked():
    """An oversubscription below one, and a bandwidth of zero, are refused."""
    kind = node_type("h100_sxm")
    with pytest.raises(TopologyError, match=r"oversubscription=0\.5"):
        kind.with_network(oversubscription=0.5)
    with pytest.raises(TopologyError, match="bytes_per_s_per_device=0"):
        kind.with_network(bytes_per_s_per_device=0)


def test_a_ring_between_racks_uses_eight_cards():
    """A ring between two NVL72 racks uses eight of 72 cards, and an all-to-all uses all cards."""
    rack = Cluster("gb200_nvl72", nodes=2)
    links = rack.group_links({"a": 144}, ("a",))
    assert (links.per_node, links.used_cards) == (72, 8)
    wide = dataclasses.replace(links, cards=0)
    assert all_gather_time(1e10, links) >= 1e10 * 143 / 144 / (8 * 47e9) > all_gather_time(1e10, wide)
    assert all_to_all_time(1e10, links) == all_to_all_time(1e10, wide)
    assert Cluster("h100_sxm", nodes=2).group_links({"a": 16}, ("a",)).used_cards == 8
