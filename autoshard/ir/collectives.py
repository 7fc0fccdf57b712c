"""Predicates on calls of lowered graphs: start of a collective, wait for a collective, memory held in between."""

from __future__ import annotations

import torch
from torch import fx

_aten, _c10d = torch.ops.aten, torch.ops._c10d_functional

WAIT = _c10d.wait_tensor.default
ALL_REDUCE = _c10d.all_reduce.default
REDUCE_SCATTER = _c10d.reduce_scatter_tensor.default
ALL_GATHER = _c10d.all_gather_into_tensor.default
_NAMESPACE = "_c10d_functional"


def is_wait(node: fx.Node) -> bool:
    """Whether a node waits for a collective."""
    return node.target is WAIT


def is_collective(node: fx.Node) -> bool:
    """Whether a node starts a collective."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target.namespace == _NAMESPACE and target is not WAIT


def holds_operand(node: fx.Node) -> bool:
    """Whether a node starts a collective that needs its operand until the wait.

    False for an all-reduce, which works on a copy.
    """
    return is_collective(node) and node.target is not ALL_REDUCE


def reduces_in_place(node: fx.Node) -> bool:
    """Whether an all-reduce may write its result over its operand, a fresh buffer without another reader.

    The buffer is packed by `cat`, or filled by `autoshard.graphs.fill_buckets`. The runtime runs such an all-reduce in
    place, and memory is counted accordingly.
    """
    operand = node.args[0] if node.target is ALL_REDUCE else None
    if not isinstance(operand, fx.Node):
        return False
    if operand.target is _aten.new_empty.default:
        return all(user is node or user.target is _aten.split_with_sizes.default for user in operand.users)
    return operand.target is _aten.cat.default and len(operand.users) == 1
