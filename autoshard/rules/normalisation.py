"""Rules of layer norm, RMS norm and group norm.

All dims except the normalised dims may be split without communication. If a normalised dim is split, the rewrite sums
the moments of each row over the ranks (`autoshard.rules.split_norms`). Gradients of weights and biases are sums over
rows. Every backward is linear in the gradient of the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any

import torch

from autoshard.rules import split_norms
from autoshard.rules.dims import ONE, named, names
from autoshard.rules.notation import Dims, Rewrite, Rule
from autoshard.rules.registry import sharding_rule

aten = torch.ops.aten


def _row_dims(x: torch.Tensor, normalized: Sequence[int]) -> tuple[Dims, Dims, Dims]:
    """Return the dims of the operand, of the statistics of its rows, and of the weights.

    Rows have the factors r0, r1, ..., and normalised dims have the factors n0, n1, ...
    """
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
    local = split_norms.layer_norm(x, len(normalized), [weight, bias])
    return _norm(x, normalized, [weight, bias], local, statistics=2)


@sharding_rule(aten._fused_rms_norm.default)
def rms_norm(x: torch.Tensor, normalized: Sequence[int], weight: torch.Tensor | None, eps: float | None) -> Rule:
    return _norm(x, normalized, [weight], split_norms.rms_norm(x, len(normalized), weight), statistics=1)


def _norm(x: torch.Tensor, normalized: Sequence[int], weights: Sequence[Any], local: Rewrite, statistics: int) -> Rule:
    dims, row_dims, width = _row_dims(x, normalized)
    operands = (dims, *(width for weight in weights if weight is not None))
    return Rule(
        (operands, (dims, *[row_dims] * statistics)),
        whole=dict.fromkeys(names(width), range(1, 1 + statistics)),
        local=local,
        padding=dict.fromkeys(names(width), 0),
    )


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
    local = split_norms.layer_norm_backward(x, len(normalized), weight)
    return _norm_backward(x, normalized, [weight, bias], local, 2, output_mask)


@sharding_rule(aten._fused_rms_norm_backward.default)
def rms_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    normalized: Sequence[int],
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    output_mask: Sequence[bool],
) -> Rule:
    local = split_norms.rms_norm_backward(x, len(normalized), weight)
    return _norm_backward(x, normalized, [weight], local, 1, output_mask)


def _norm_backward(
    x: torch.Tensor,
    normalized: Sequence[int],
    weights: Sequence[Any],
    local: Rewrite,
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
        exchanged=dict.fromkeys(names(width), 1),
        local=local,
        padding=dict.fromkeys(names(width), 0),
    )


# Groups of channels.


@sharding_rule(aten.native_group_norm.default)
def group_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None,
    n: int, c: int, hxw: int, group: int, eps: float,
) -> Rule:  # fmt: skip
    channels = ("g", "c")
    space = named(x.dim() - 2, "s")
    dims = (("n",), channels, *space)
    operands = (dims, *((channels,) for tensor in (weight, bias) if tensor is not None))
    rows = (("n",), ("g",))
    return Rule(
        (operands, (dims, rows, rows)),
        sizes={"g": group},
        blocked=("c",),
        whole=dict.fromkeys(names(space), (1, 2)),
        local=split_norms.group_norm(x, [weight, bias], names(space)),
        padding={},
        even=names(space),
    )


@sharding_rule(aten.native_group_norm_backward.default)
def group_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor | None,
    n: int, c: int, hxw: int, group: int, output_mask: Sequence[bool],
) -> Rule:  # fmt: skip
    channels = ("g", "c")
    space = named(x.dim() - 2, "s")
    dims = (("n",), channels, *space)
    rows = (("n",), ("g",))
    operands = (dims, dims, rows, rows, *((channels,) for tensor in (weight,) if tensor is not None))
    gradients: tuple[Dims, ...] = (dims, (channels,), (channels,))
    results = tuple(gradient for gradient, is_asked in zip(gradients, output_mask, strict=True) if is_asked)
    return Rule(
        (operands, results),
        sizes={"g": group},
        reduce=dict.fromkeys(("n", *names(space)), "sum"),
        linear=[(0,)],
        blocked=("c",),
        exchanged=dict.fromkeys(names(space), 1),
        local=split_norms.group_norm_backward(x, weight, names(space)),
        padding={},
        even=names(space),
    )
