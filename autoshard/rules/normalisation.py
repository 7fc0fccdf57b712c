"""Rules of normalisations.

Rows (all but the normalised dims) are independent; normalised dims are blocked. Gradients of weights and
biases are sums over rows. Every backward is linear in the gradient of the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autoshard.rules.dims import ONE, all_blocked, named, names
from autoshard.rules.local import LocalContext
from autoshard.rules.notation import Dims, Rule
from autoshard.rules.registry import sharding_rule

aten = torch.ops.aten


def _row_dims(x: torch.Tensor, normalized: Sequence[int]) -> tuple[Dims, Dims, Dims]:
    """The dims of the operand, of the statistics of its rows, and of the weights."""
    rows = named(x.dim() - len(normalized), "r")
    width = named(len(normalized), "n")
    return (*rows, *width), (*rows, *[ONE] * len(normalized)), width


@sharding_rule(aten.native_layer_norm.default)
def layer_norm(
    x: torch.Tensor,
    normalized: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> Rule:
    return _norm(x, normalized, [weight, bias], statistics=2)


@sharding_rule(aten._fused_rms_norm.default)
def rms_norm(x: torch.Tensor, normalized: Sequence[int], weight: torch.Tensor | None, eps: float | None) -> Rule:
    return _norm(x, normalized, [weight], statistics=1)


def _norm(x: torch.Tensor, normalized: Sequence[int], weights: Sequence[Any], statistics: int) -> Rule:
    dims, row_dims, width = _row_dims(x, normalized)
    operands = (dims, *(width for weight in weights if weight is not None))
    return Rule((operands, (dims, *[row_dims] * statistics)), blocked=names(width))


@sharding_rule(aten.native_layer_norm_backward.default)
def layer_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    normalized: Sequence[int],
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    output_mask: Sequence[bool],
) -> Rule:
    return _norm_backward(x, normalized, [weight, bias], 2, output_mask)


@sharding_rule(aten._fused_rms_norm_backward.default)
def rms_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    normalized: Sequence[int],
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    output_mask: Sequence[bool],
) -> Rule:
    return _norm_backward(x, normalized, [weight], 1, output_mask)


def _norm_backward(
    x: torch.Tensor,
    normalized: Sequence[int],
    weights: Sequence[Any],
    statistics: int,
    output_mask: Sequence[bool],
) -> Rule:
    dims, row_dims, width = _row_dims(x, normalized)
    operands = (dims, dims, *[row_dims] * statistics, *(width for weight in weights if weight is not None))
    gradients = (dims, *[width] * len(weights))
    results = tuple(gradient for gradient, is_asked in zip(gradients, output_mask, strict=True) if is_asked)
    return Rule((operands, results), reduce=dict.fromkeys(names(row_dims), "sum"), linear=[(0,)], blocked=names(width))


# Groups of channels.


@sharding_rule(aten.native_group_norm.default)
def group_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None,
    n: int, c: int, hxw: int, group: int, eps: float,
) -> Rule:  # fmt: skip
    channels = ("g", "c")
    dims = (("n",), channels, *all_blocked(x.dim() - 2))
    operands = (dims, *((channels,) for tensor in (weight, bias) if tensor is not None))
    rows = (("n",), ("g",))
    return Rule((operands, (dims, rows, rows)), sizes={"g": group}, blocked=("c",), local=_local_group_norm, padding={})


def _local_group_norm(
    context: LocalContext, x: Any, weight: Any, bias: Any, n: int, c: int, hxw: int, group: int, eps: float
) -> Any:
    n, c = context.input_shape(0)[:2]
    return context.default(x, weight, bias, n, c, hxw, context.local_size("g"), eps)


@sharding_rule(aten.native_group_norm_backward.default)
def group_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor | None,
    n: int, c: int, hxw: int, group: int, output_mask: Sequence[bool],
) -> Rule:  # fmt: skip
    channels = ("g", "c")
    dims = (("n",), channels, *(("_",),) * (x.dim() - 2))
    rows = (("n",), ("g",))
    operands = (dims, dims, rows, rows, *((channels,) for tensor in (weight,) if tensor is not None))
    gradients: tuple[Dims, ...] = (dims, (channels,), (channels,))
    results = tuple(gradient for gradient, is_asked in zip(gradients, output_mask, strict=True) if is_asked)
    return Rule(
        (operands, results), sizes={"g": group}, reduce={"n": "sum"}, linear=[(0,)], blocked=("c",),
        local=_local_group_norm_backward,
        padding={},
    )  # fmt: skip


def _local_group_norm_backward(
    context: LocalContext, grad: Any, x: Any, mean: Any, rstd: Any, weight: Any,
    n: int, c: int, hxw: int, group: int, output_mask: Sequence[bool],
) -> Any:  # fmt: skip
    n, c = context.input_shape(1)[:2]
    return context.default(grad, x, mean, rstd, weight, n, c, hxw, context.local_size("g"), output_mask)
