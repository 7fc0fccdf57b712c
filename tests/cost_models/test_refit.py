"""Corrections of a cluster's constants by factors."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.collectives import all_gather_time, all_reduce_time
from cost_models.compute import work_time
from cost_models.hardware import Cluster, NodeType, node_type
from cost_models.refit import constant_of_link, constant_of_memory, constant_of_work, refitted
from cost_models.topology import MeasuredCollective
from cost_models.work import AttentionShape, Kind, MatmulShape, Work

FACTORS = st.floats(0.05, 20.0)
WORKS = {
    "aten.mm.default": Work(2e12, 0.0, 0.0, Kind.MATMUL, "bf16", (MatmulShape(10_000, 10_000, 10_000),)),
    "aten.add.Tensor": Work(0.0, 2e9, 1e9, Kind.POINTWISE, "bf16"),
    "autoshard.attention.default": Work(
        1e12, 0.0, 0.0, Kind.ATTENTION, "bf16", attention=AttentionShape(512, 4096, 4096, 64, 64)
    ),
}


def with_curves(node: NodeType) -> NodeType:
    curve = ((1e3, 1e9), (1e9, 1e10))
    return replace(node, device=replace(node.device, throughput={"memory": curve, "attention": curve}))


NODES = {"roofline": node_type("h100_sxm"), "curves": with_curves(node_type("cpu_laptop"))}


@pytest.mark.parametrize("operator", WORKS)
@pytest.mark.parametrize("kind", NODES)
@given(factor=FACTORS)
def test_a_factor_multiplies_the_seconds_of_a_call(kind: str, operator: str, factor: float) -> None:
    """A factor of a constant multiplies the seconds, without the launch, of the calls that the constant prices,
    and no others."""
    node, done = NODES[kind], WORKS[operator]
    launch_s = node.device.launch_latency_s
    constant = constant_of_work(done, node.device, operator)
    new = refitted(node, {constant: factor}, launch_s)
    for other, each in WORKS.items():
        before, after = (work_time(each, unit.device, other) - launch_s for unit in (node, new))
        assert after == pytest.approx(before * (factor if other == operator else 1.0), rel=1e-6)


@given(factor=FACTORS)
def test_a_factor_multiplies_the_seconds_of_a_collective(factor: float) -> None:
    """A link without measured collectives has one factor for all, and a link with them has a factor for each."""
    node = node_type("cpu_laptop")
    measured = replace(node, intra=replace(node.intra, measured=(MeasuredCollective("all_reduce", 1e-4, 1e-5, 1e9),)))
    for each, expected in ((node, "link.intra"), (measured, "link.intra.all_reduce")):
        group = Cluster(each, 1, 2).group_links({"data": 2}, ("data",))
        assert constant_of_link("all_reduce", group) == expected
        new = Cluster(refitted(each, {expected: factor}, 1e-6), 1, 2).group_links({"data": 2}, ("data",))
        assert all_reduce_time(2**24, new) == pytest.approx(factor * all_reduce_time(2**24, group))
    old, new = (Cluster(unit, 1, 2).group_links({"data": 2}, ("data",)) for unit in (measured, measured))
    assert all_gather_time(2**24, new) == all_gather_time(2**24, old)


def test_names_of_constants() -> None:
    h100, laptop = NODES["roofline"].device, NODES["curves"].device
    assert [constant_of_work(done, h100, name) for name, done in WORKS.items()] == [
        "matmul.bf16",
        "memory",
        "attention",
    ]
    found = [constant_of_work(done, laptop, name) for name, done in WORKS.items()]
    assert found == ["matmul.bf16", "throughput.aten.add.Tensor", "throughput.attention"]
    assert constant_of_work(Work(1.0, 1.0, 1.0, Kind.FACTORISATION, "f32"), h100, "aten.linalg_qr.default") == ""
    assert constant_of_memory(laptop, "aten.clone.default") == "throughput.aten.clone.default"
    network = Cluster("h100_sxm", 2, 8).group_links({"data": 16}, ("data",))
    assert constant_of_link("all_gather", network) == "link.inter"


def test_the_network_has_a_factor_of_its_own() -> None:
    node = node_type("h100_sxm")
    new = refitted(node, {"link.inter": 2.0}, node.device.launch_latency_s)
    assert new.intra == node.intra
    assert node.inter is not None
    assert new.inter is not None
    assert new.inter.bandwidth_bytes_per_s == node.inter.bandwidth_bytes_per_s / 2


def test_the_host_bus_is_a_link_in_the_node() -> None:
    """The factor of links in a node also holds for devices that are joined by the host bus."""
    node = node_type("h100_pcie")
    nodes = (node, refitted(node, {"link.intra": 2.0}, 0.0))
    for shape in ({"data": 8}, {"others": 4, "data": 2}):
        old, new = (Cluster(each, 1, 8).group_links(shape, ("data",)) for each in nodes)
        assert all_reduce_time(2**24, new) == pytest.approx(2 * all_reduce_time(2**24, old))
