"""Correct the constants of a cluster by profiles of steps: the constant that prices a call, and new constants.

A constant has a name: "matmul.bf16", "attention", "memory", "throughput.aten.add.Tensor", "link.intra",
"link.intra.all_reduce". A factor of a constant multiplies the seconds that it predicts, without the launches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from cost_models.device import Device
from cost_models.hardware import NodeType
from cost_models.throughput import MEMORY, Curve, kernel_of
from cost_models.topology import GroupLinks, Link
from cost_models.work import Kind, Work

_MATMUL, _THROUGHPUT, _LINK = "matmul.", "throughput.", "link."
_ATTENTION, _MEMORY = "attention", "memory"


def constant_of_work(work: Work, device: Device, operator: str) -> str:
    """Return the name of the constant that prices an operator; "" for a factorisation, which several constants price.

    Example:
        >>> from cost_models.device import device
        >>> from cost_models.work import MatmulShape
        >>> product = Work(16.0, 8.0, 8.0, Kind.MATMUL, "bf16", (MatmulShape(2, 2, 2),))
        >>> constant_of_work(product, device("h100_sxm"), "aten.mm.default")
        'matmul.bf16'
    """
    if kernel_of(operator) in device.throughput:
        return f"{_THROUGHPUT}{kernel_of(operator)}"
    if work.kind is Kind.FACTORISATION:
        return ""
    if work.attention is not None:
        return _ATTENTION
    return f"{_MATMUL}{work.dtype}" if work.products else constant_of_memory(device, operator)


def constant_of_memory(device: Device, operator: str) -> str:
    """Return the name of the constant that prices an operator that only moves bytes."""
    return f"{_THROUGHPUT}{kernel_of(operator)}" if MEMORY in device.throughput else _MEMORY


def constant_of_link(collective: str, group: GroupLinks) -> str:
    """Return the name of the constant that prices a collective such as "all_reduce" in a group of ranks."""
    if group.nodes > 1:
        return f"{_LINK}inter"
    return f"{_LINK}intra.{collective}" if group.measured(collective) else f"{_LINK}intra"


def refitted(node: NodeType, factors: Mapping[str, float], launch_latency_s: float) -> NodeType:
    """Return a node type with another launch latency, and with constants corrected by `factors` (name to factor).

    A factor multiplies the seconds that its constant predicts. Constants without a factor stay as they are.

    Example:
        >>> from cost_models.hardware import node_type
        >>> old = node_type("h100_sxm")
        >>> new = refitted(old, {"matmul.bf16": 2.0}, 3e-6)
        >>> old.device.matmul.efficiency["bf16"] / new.device.matmul.efficiency["bf16"], new.device.launch_latency_s
        (2.0, 3e-06)
    """
    inter = None if node.inter is None else _link(node.inter, f"{_LINK}inter", factors)
    host = None if node.wiring.host is None else _link(node.wiring.host, f"{_LINK}intra", factors)
    return replace(
        node,
        device=replace(_device(node.device, factors), launch_latency_s=launch_latency_s),
        intra=_link(node.intra, f"{_LINK}intra", factors),
        inter=inter,
        wiring=replace(node.wiring, host=host),
    )


def _device(device: Device, factors: Mapping[str, float]) -> Device:
    products = {
        dtype: share / factors.get(f"{_MATMUL}{dtype}", 1.0) for dtype, share in device.matmul.efficiency.items()
    }
    attention = factors.get(_ATTENTION, 1.0)
    return replace(
        device,
        memory_efficiency=device.memory_efficiency / factors.get(_MEMORY, 1.0),
        matmul=replace(device.matmul, efficiency=products),
        attention_efficiency=device.attention_efficiency / attention,
        attention={name: kernel.slowed(attention) for name, kernel in device.attention.items()},
        throughput=_curves(device.throughput, factors),
    )


def _curves(curves: Mapping[str, Curve], factors: Mapping[str, float]) -> dict[str, Curve]:
    """Return the curves with rates divided by `factors` ("throughput.aten.add.Tensor" to a factor).

    If `factors` names a kernel without a curve of its own, the kernel gets the curve `MEMORY` with divided rates.
    """
    found = dict(curves)
    for constant, factor in factors.items():
        if constant.startswith(_THROUGHPUT):
            kernel = constant.removeprefix(_THROUGHPUT)
            curve = curves.get(kernel) or curves[MEMORY]
            found[kernel] = tuple((size, rate / factor) for size, rate in curve)
    return found


def _link(link: Link, name: str, factors: Mapping[str, float]) -> Link:
    slowed = link.slowed(factors.get(name, 1.0))
    measured = tuple(
        replace(
            each,
            start_s=each.start_s * factor,
            latency_s=each.latency_s * factor,
            bandwidth_bytes_per_s=each.bandwidth_bytes_per_s / factor,
        )
        for each in link.measured
        for factor in (factors.get(f"{name}.{each.name}", 1.0),)
    )
    return replace(slowed, measured=measured)
