"""Rules of normalisations.

Rows (all but the normalised dims) are independent; normalised dims are blocked. Gradients of weights and
biases are sums over rows. Every backward is linear in the gradient of the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any

import torch

from autoshard.rules.carries import LinearResult, increasing, linear_result, meaningful, only_in, sums, sums_by_result
from autoshard.rules.dims import ONE, all_blocked, named, names, tensors
from autoshard.rules.local import LocalContext
from autoshard.rules.notation import Carry, Dims, Rule
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
    carries = affine(weights, 1, 1 + statistics)
    return Rule((operands, (dims, *[row_dims] * statistics)), blocked=names(width), carries=carries)


def affine(weights: Sequence[torch.Tensor | None], first: int, results: int) -> list[Carry]:
    """What passes through a weight and a bias (`None` where absent) into the first of `results`.

    Args:
        weights: weight, and bias if the operator has one.
        first: index of the first of them among the operands.
        results: how many results there are.
    """
    present = tensors(*weights)
    if not present:
        return []
    together = range(first, first + len(present))
    is_linear = weights[0] is not None
    of_bias = increasing((together[-1],)) if weights[-1] is not None and len(weights) > 1 else []
    carries = [*(sums(together) if is_linear else []), *meaningful({together[-1]: present[-1]}, of_bias)]
    return only_in(0, results, carries)


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
    results = tuple(compress(gradients, output_mask))
    return Rule(
        (operands, results),
        reduce=dict.fromkeys(names(row_dims), "sum"),
        linear=[(0,)],
        blocked=names(width),
        carries=_carried_back(weights, statistics, output_mask),
    )


def _carried_back(weights: Sequence[Any], statistics: int, output_mask: Sequence[bool]) -> list[Carry]:
    """Operands: gradient, operand, statistics of its rows (mean, and inverse deviation last), weight."""
    weight, inverse = 2 + statistics, 1 + statistics
    centred = (1, *range(2, inverse))
    everything = range(weight + 1)
    of_weight = linear_result(range(weight), (0,), centred, (inverse,))
    linear: list[LinearResult] = [
        linear_result(everything, (0,), *([(weight,)] if weights[0] is not None else [])),
        of_weight,
        linear_result((0,), (0,)),
    ]
    return sums_by_result(list(compress(linear, output_mask)))


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
    return Rule(
        (operands, (dims, rows, rows)), sizes={"g": group}, blocked=("c",), local=_local_group_norm, padding={},
        carries=affine((weight, bias), 1, 3),
    )  # fmt: skip


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
