"""Finds values that a backward should recompute instead of reading, for a compiler that fuses pointwise operators.

A saved value is written to memory and read back. A value that is recomputed inside a fused kernel costs nothing. Some
sets of forward values suffice to compute all that the backward reads by pointwise calls, views and casts. The set with
the fewest bytes is saved (Chen et al. 2016; as a cut by Jain et al. 2022, "min-cut rematerialization").

Minimise the sum of w(v) over saved values v. A matrix product, a reduction, a collective or an input is never
recomputed. Every path from such a value to a value that the backward reads must pass through a saved value. The weight
w(v) of an input is one byte, because inputs are in memory anyway. For any other value, w(v) is the bytes of v. They are
doubled if v is only written to memory when it is saved. They grow by a tenth for each call between v and its use in the
backward.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence

import networkx as nx
import torch
from torch import fx

from autoshard.graphs.pointwise import is_pointwise

_aten = torch.ops.aten
_SOURCE, _SINK = "source", "sink"
_GROWTH, _FARTHEST = 1.1, 100
_LEAST_BYTES = 1.0
_CHEAP = frozenset(
    {
        *(_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default, _aten.t.default),
        *(_aten.transpose.int, _aten.permute.default, _aten.expand.default, _aten.unsqueeze.default),
        *(_aten.squeeze.dim, _aten.squeeze.dims, _aten.slice.Tensor, _aten.select.int, _aten.split.Tensor),
        *(_aten.split_with_sizes.default, _aten.unbind.int, _aten.alias.default, _aten.detach.default),
        *(_aten._to_copy.default, _aten.clone.default, _aten.cat.default, _aten.full.default, _aten.arange.default),
        *(_aten.arange.start, _aten.arange.start_step, _aten.zeros.default, _aten.ones.default),
        *(_aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default),
    }
)

_REDUCTIONS = frozenset(
    {"sum", "mean", "amax", "amin", "var_mean", "logsumexp", "native_layer_norm", "_softmax", "_log_softmax"}
)


def computed_again(nodes: Sequence[fx.Node], forward: Collection[fx.Node], wanted: Collection[fx.Node]) -> set[fx.Node]:
    """Return the forward nodes that the backward should recompute.

    Args:
        nodes: nodes of the uncut program, in order.
        forward: nodes of the forward, including its inputs.
        wanted: nodes whose values the backward reads.
    """
    relevant = _relevant(nodes, forward, wanted)
    network = nx.DiGraph()
    network.add_nodes_from((_SOURCE, _SINK))
    distances = _distances(relevant, wanted)
    for node in relevant:
        weight = _weight(node, distances[node])
        network.add_edge((node, "made"), (node, "read"), **({} if weight is None else {"capacity": weight}))
        if node in wanted:
            network.add_edge((node, "read"), _SINK)
        if not _is_cheap(node):
            network.add_edge(_SOURCE, (node, "made"))
            continue
        for operand in node.all_input_nodes:
            if operand in distances:
                network.add_edge((operand, "read"), (node, "made"))
    _, (_, behind) = nx.minimum_cut(network, _SOURCE, _SINK)
    return {node for node in relevant if (node, "made") in behind}


def _relevant(nodes: Sequence[fx.Node], forward: Collection[fx.Node], wanted: Collection[fx.Node]) -> list[fx.Node]:
    """Return the forward values in `wanted`, and all values from which cheap calls compute them.

    A cheap call is one that `_is_cheap` accepts. The last value of the program comes first.
    """
    found: list[fx.Node] = []
    needed = {node for node in wanted if node in forward and _holds_tensors(node)}
    for node in reversed(nodes):
        if node in needed:
            found.append(node)
            if _is_cheap(node):
                needed.update(operand for operand in node.all_input_nodes if _holds_tensors(operand))
    return found


def _distances(relevant: Sequence[fx.Node], wanted: Collection[fx.Node]) -> dict[fx.Node, int]:
    """Return for each value the number of cheap calls on the shortest way from the value to a wanted value."""
    found: dict[fx.Node, int] = {}
    for node in relevant:
        behind = [found[user] + 1 for user in node.users if user in found and _is_cheap(user)]
        found[node] = 0 if node in wanted else min(behind)
    return found


def _weight(node: fx.Node, distance: int) -> float | None:
    """Return the weight w(v) of saving a value v, as the module defines it, or None if the value cannot be saved.

    `distance` is the number of calls between v and its use in the backward.
    """
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or node.op == "get_attr":
        return None
    if node.op == "placeholder":
        return _LEAST_BYTES  # stays in memory anyway
    is_written = not _is_cheap(node) or not all(_is_cheap(user) or _is_reduction(user) for user in node.users)
    size = max(_LEAST_BYTES, float(value.numel() * value.element_size()))
    return size * (1.0 if is_written else 2.0) * _GROWTH ** min(distance, _FARTHEST)


def _is_cheap(node: fx.Node) -> bool:
    """Whether a fused kernel can compute a value on the fly: a pointwise call, a view, a cast or a constant."""
    if node.op == "get_attr":
        return True
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return all(map(_is_cheap, node.all_input_nodes))
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    is_drawn = torch.Tag.nondeterministic_seeded in node.target.tags
    return node.target in _CHEAP or (is_pointwise(node.target) and not is_drawn)


def _is_reduction(node: fx.Node) -> bool:
    """Whether a call is a reduction, a norm or a softmax. A fused kernel can compute the call's operand on the fly."""
    return getattr(node.target, "_opname", None) in _REDUCTIONS


def _holds_tensors(node: fx.Node) -> bool:
    """Whether a value is a tensor or a tuple. An integer, such as a rank's index, is computed again in each phase."""
    value = node.meta.get("val")
    return isinstance(value, (torch.Tensor, tuple, list))
