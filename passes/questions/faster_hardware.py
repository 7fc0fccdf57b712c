"""Make a copy of a cluster with one part a tenth faster: matrix products, device memory, links or network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from cost_models.hardware import Cluster, NodeType
from cost_models.topology import Link

MORE = 1.1
"""The factor by which `limits` increases each resource."""

SHARE = f"{MORE - 1:.0%}".replace("%", " %")


def _faster_products(cluster: Cluster) -> Cluster:
    peaks = {dtype: MORE * peak for dtype, peak in cluster.device.peak_flops.items()}
    return _with_node(cluster, cluster.node.with_device(replace(cluster.node.device, peak_flops=peaks)))


def _faster_memory(cluster: Cluster) -> Cluster:
    unit = cluster.node.device
    curves = {name: tuple((size, MORE * rate) for size, rate in curve) for name, curve in unit.throughput.items()}
    bandwidth = MORE * unit.memory_bandwidth_bytes_per_s
    faster = replace(unit, memory_bandwidth_bytes_per_s=bandwidth, throughput=curves)
    return _with_node(cluster, cluster.node.with_device(faster))


def _faster_fabric(cluster: Cluster) -> Cluster | None:
    if cluster.devices_per_node == 1:
        return None
    wiring, host = cluster.node.wiring, cluster.node.wiring.host
    faster = replace(wiring, host=None if host is None else _faster_link(host))
    return _with_node(cluster, replace(cluster.node, intra=_faster_link(cluster.node.intra), wiring=faster))


def _faster_network(cluster: Cluster) -> Cluster | None:
    if cluster.nodes == 1 or cluster.node.inter is None:
        return None
    return _with_node(cluster, replace(cluster.node, inter=_faster_link(cluster.node.inter)))


def _faster_link(link: Link) -> Link:
    measured = tuple(replace(item, bandwidth_bytes_per_s=MORE * item.bandwidth_bytes_per_s) for item in link.measured)
    return replace(link.scaled(MORE), measured=measured)


def _with_node(cluster: Cluster, node: NodeType) -> Cluster:
    return Cluster(node, cluster.nodes, cluster.devices_per_node, cluster.in_step)


FASTER: Mapping[str, Callable[[Cluster], Cluster | None]] = {
    f"{SHARE} faster matrix products": _faster_products,
    f"{SHARE} faster device memory": _faster_memory,
    f"{SHARE} faster links in a node": _faster_fabric,
    f"{SHARE} faster network": _faster_network,
}
"""Name of a part → function that returns a copy of a cluster with this part faster, or None without the part."""
