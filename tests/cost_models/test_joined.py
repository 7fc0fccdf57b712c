"""Joined clusters: islands, what joins them, and their files."""

from __future__ import annotations

from pathlib import Path

import networkx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.errors import HardwareFileError, TopologyError, UnknownHardwareError
from cost_models.hardware import Cluster, node_type
from cost_models.joined import JoinedCluster

H100, A100 = Cluster("h100_sxm", 2, 8), Cluster("a100_sxm_80gb", 4, 8)


def test_its_islands_are_named_and_counted() -> None:
    """As the command line reads them."""
    joined = JoinedCluster([H100, A100])
    assert (joined.name, joined.size, joined.uniform) == ("h100_sxm:2x8+a100_sxm_80gb:4x8", 48, None)


@given(st.sampled_from(["h100_sxm", "a100_sxm_80gb", "l4"]), st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_like_islands_on_their_own_network_are_one(name: str, nodes: list[int]) -> None:
    """With all their nodes."""
    joined = JoinedCluster([Cluster(name, count, 1) for count in nodes])
    assert joined.uniform == Cluster(name, sum(nodes), 1)


def test_a_network_of_another_kind_keeps_like_islands_apart() -> None:
    """What joins them is not what joins their nodes."""
    assert len(JoinedCluster([H100, H100], network="roce_v2").islands) == 2


def test_the_slower_of_two_networks_joins_islands() -> None:
    """Unless one is given, which then joins all."""
    slow = Cluster(node_type("a100_sxm_80gb").with_network(bytes_per_s_per_device=1e9), 2, 8)
    assert JoinedCluster([H100, slow]).link(0, 1).bandwidth_bytes_per_s == 1e9
    given = JoinedCluster([H100, slow], network="infiniband_ndr400").link(1, 0)
    assert given == JoinedCluster([H100, A100], network="infiniband_ndr400").link(0, 1)


@pytest.mark.parametrize("network", [None, "roce_v2"])
def test_a_file_is_read_back(tmp_path: Path, network: str | None) -> None:
    """Islands, their nodes and the network."""
    joined = JoinedCluster([H100, A100], network=network)
    joined.save(tmp_path / "joined.toml", source="test", date="2026-11-22")
    found = JoinedCluster.load(tmp_path / "joined.toml")
    assert found == joined


def test_a_file_by_hand_names_node_types_and_files(tmp_path: Path) -> None:
    """A calibrated cluster lies beside it."""
    H100.save(tmp_path / "mine.toml", source="test", date="2026-11-22")
    text = """
        network = "roce_v2"
        [[islands]]
        file = "mine.toml"
        [[islands]]
        node = "a100_sxm_80gb"
        nodes = 4
    """
    (tmp_path / "joined.toml").write_text(text)
    assert JoinedCluster.load(tmp_path / "joined.toml") == JoinedCluster([H100, A100], network="roce_v2")


@pytest.mark.parametrize(
    ("text", "culprit"),
    [
        ("x = 1", "no islands"),
        ("[[islands]]\nnode = 'l4'\nnodse = 2", "nodse"),
        ("[[islands]]\nnode = 'l4'\nnodes = 'two'", "whole numbers"),
        ("[[islands]]\nname = 'mine'", "'device' is missing"),
        ("islands = [3]", "3 is no table"),
        ("[[islands]", "not a TOML file"),
    ],
)
def test_a_file_that_is_none_is_an_error(tmp_path: Path, text: str, culprit: str) -> None:
    """It names what is wrong."""
    (tmp_path / "joined.toml").write_text(text)
    with pytest.raises(HardwareFileError, match=culprit):
        JoinedCluster.load(tmp_path / "joined.toml")


def test_a_file_of_islands_is_no_cluster_of_one_kind(tmp_path: Path) -> None:
    """The error says what reads it."""
    JoinedCluster([H100, A100]).save(tmp_path / "joined.toml", source="test", date="2026-11-22")
    with pytest.raises(HardwareFileError, match=r"JoinedCluster\.load"):
        Cluster.load(tmp_path / "joined.toml")


def test_islands_without_a_network_need_one() -> None:
    """The error names the island."""
    alone = Cluster("cpu_laptop", 1, 2)
    with pytest.raises(UnknownHardwareError, match=r"cpu_laptop:1x2 has no network"):
        JoinedCluster([H100, alone])
    assert JoinedCluster([H100, alone], network="roce_v2").size == 18


def test_islands_are_clusters() -> None:
    """One at least."""
    with pytest.raises(TopologyError, match="its islands are Clusters"):
        JoinedCluster([])


def test_devices_of_two_islands_meet_at_the_core() -> None:
    """A path between them is as wide as the link that is priced."""
    slow = Cluster(node_type("a100_sxm_80gb").with_network(bytes_per_s_per_device=1e9), 2, 8)
    joined = JoinedCluster([H100, slow])
    graph = joined.topology()
    devices = [node for node in graph if node[0] == "device"]
    assert sorted(devices) == [("device", rank) for rank in range(joined.size)]
    edges = [(("device", 0), ("core",)), (("core",), ("device", 20))]
    assert min(graph.edges[edge]["bytes_per_s"] for edge in edges) == joined.link(0, 1).reached_bytes_per_s
    assert networkx.is_connected(graph)
