"""Predicates on nodes of lowered graphs: whether a node starts a collective, waits for one, or reduces in place."""

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
    """Whether a node is a `wait_tensor`, which waits for a collective."""
    return node.target is WAIT


def is_collective(node: fx.Node) -> bool:
    """Whether a node starts a functional collective (`torch.ops._c10d_functional`); False for the wait."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target.namespace == _NAMESPACE and target is not WAIT


def holds_operand(node: fx.Node) -> bool:
    """Whether a node starts a collective that reads its operand until the wait. An all-reduce copies its operand."""
    return is_collective(node) and node.target is not ALL_REDUCE


def reduces_in_place(node: fx.Node) -> bool:
    """Whether `node` is an all-reduce that may overwrite its operand.

    The operand is then a new buffer that nothing else reads. `cat` packs it, or `autoshard.graphs.fill_buckets` fills
    it. The runtime reduces in place, and predictions count no second buffer.
    """
    operand = node.args[0] if node.target is ALL_REDUCE else None
    if not isinstance(operand, fx.Node):
        return False
    if operand.target is _aten.new_empty.default:
        return all(user is node or user.target is _aten.split_with_sizes.default for user in operand.users)
    return operand.target is _aten.cat.default and len(operand.users) == 1
