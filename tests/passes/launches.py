"""Counts of the launches and of the fused kernels of lowered programs."""

from __future__ import annotations

from collections import Counter

from torch import fx

from passes.lowering.count_launches import Traffic, traffic_of


def count_launches(graph_module: fx.GraphModule) -> Traffic:
    """The launches and bytes of one run of a lowered program; nodes have fake values in `meta["val"]`."""
    return sum((traffic_of(node) for node in graph_module.graph.nodes), Traffic())


def fused_calls(graph_module: fx.GraphModule) -> Counter[str]:
    """How often each kernel is called, by the kernel's name."""
    names = (str(node.target) for node in graph_module.graph.nodes)
    return Counter(name for name in names if name.startswith("autoshard.triton_"))
