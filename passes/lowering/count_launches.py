"""Counts the kernels that a program launches on a device, and the bytes that they read and write.

A view launches nothing. Neither do `contiguous` and `reshape` if their operand already has the right strides. Any other
call counts as one kernel, which reads each tensor operand once and writes each result once. Two kinds of our kernels
launch more. Some add up partial results in a second kernel (`second_step`). Others work chunk by chunk
(`chunk_steps`). Collectives and waits are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from autoshard.ir.collectives import is_collective, is_wait
from autoshard.kernels.launch import row_tile
from autoshard.kernels.triton_linear_cross_entropy import (
    chunk_classes,
    linear_cross_entropy,
    linear_cross_entropy_backward,
)
from autoshard.kernels.triton_norm import SUMMING_PROGRAMS
from passes.strategies.tensor_infos import bytes_in

_aten = torch.ops.aten

_MAY_COPY = (_aten.contiguous.default, _aten.reshape.default)
_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Traffic:
    """Launches of kernels on one device, and the bytes that these kernels read and write."""

    launches: int = 0
    memory_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.launches + other.launches, self.memory_bytes + other.memory_bytes)

    def __mul__(self, times: int) -> Traffic:
        return Traffic(self.launches * times, self.memory_bytes * times)


def traffic_of(node: fx.Node) -> Traffic:
    """Return the launches and memory traffic of one node, or zero for views, collectives and waits."""
    if not is_launch(node):
        return Traffic()
    moved = sum(bytes_in(item.meta.get("val")) for item in (*node.all_input_nodes, node))
    return Traffic(1, moved) + second_step(node.target, node.meta.get("val")) + chunk_steps(node)


def is_launch(node: fx.Node) -> bool:
    """Whether a node launches a kernel that computes or copies. Views, collectives and waits do not."""
    if not isinstance(node.target, OpOverload) or sends(node):
        return False
    return _copies(node) if node.target in _MAY_COPY else not may_alias(node)


def may_alias(node: fx.Node) -> bool:
    """Whether a call's schema allows its result to be a view of its operand."""
    target: Any = node.target
    returned = [item.alias_info for item in target._schema.returns] if isinstance(target, OpOverload) else []
    return any(alias is not None and not alias.is_write for alias in returned)


def _copies(node: fx.Node) -> bool:
    """Whether a call of `contiguous` or `reshape` has to copy, because its result is no view of its operand."""
    (operand,) = node.all_input_nodes
    value = operand.meta["val"]
    if node.target is _aten.contiguous.default:
        return not value.is_contiguous()
    return not value.is_contiguous() and not _has_view(value, node.meta["val"].shape)


def _has_view(value: Tensor, shape: Sequence[int]) -> bool:
    try:
        torch.empty_strided(value.shape, value.stride(), device="meta").view(shape)
    except RuntimeError:
        return False
    return True


def sends(node: fx.Node) -> bool:
    """Whether a node is a collective or a wait for a collective."""
    return is_collective(node) or is_wait(node)


def second_step(target: Any, value: Any) -> Traffic:
    """Return the launches and traffic of the kernels that add up weight gradients in the backward of one of our norms.

    The norm's main kernel stores partial sums of each weight's gradient as float32 rows. One further kernel for each
    weight adds up these rows. The result is zero for operators other than these backwards.
    """
    if not str(target).startswith("autoshard.") or "norm_backward" not in str(target):
        return Traffic()
    grad, *others = (item for item in value if isinstance(item, Tensor))
    columns = grad.shape[-1]
    blocks = math.ceil(math.prod(grad.shape[:-1]) / row_tile(columns).rows)
    partial_bytes = min(blocks, SUMMING_PROGRAMS) * columns * _FLOAT_BYTES
    return sum((Traffic(1, 2 * partial_bytes + bytes_in(other)) for other in others), Traffic())


def chunk_steps(node: fx.Node) -> Traffic:
    """Return the launches and traffic of a linear cross-entropy that works in chunks of classes; zero for other calls.

    The result excludes the launch, operands and results that `traffic_of` counts for every call. For each chunk, a
    matrix product writes the logits and the loss reads them. In the backward, the gradient of the logits then replaces
    them in place, and two matrix products read it. Each chunk reads the hidden states, and adds to their gradient in
    float32.
    """
    is_backward = node.target is linear_cross_entropy_backward
    if not is_backward and node.target is not linear_cross_entropy:
        return Traffic()
    hidden, weight = (operand.meta["val"] for operand in node.all_input_nodes[is_backward:][:2])
    chunks = math.ceil(weight.shape[0] / chunk_classes(weight.shape[1]))
    logits_bytes = bytes_in(hidden) // weight.shape[1] * weight.shape[0]
    if not is_backward:
        return Traffic(2 * chunks - 1, 2 * logits_bytes + (chunks - 1) * bytes_in(hidden))
    summed_bytes = hidden.numel() * _FLOAT_BYTES
    each = 4 * bytes_in(hidden) + 2 * summed_bytes  # read for both products, the addend written and read, the sum both
    once = 2 * summed_bytes + bytes_in(weight) - bytes_in(hidden)
    return Traffic(5 * chunks + 1, 5 * logits_bytes + chunks * each + once)
