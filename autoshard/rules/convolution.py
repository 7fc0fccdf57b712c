"""Rules of convolutions: batch, groups, channels and spatial dims may be split.

A convolution is linear in operand and weight. The result is a sum over input channels, so a bias must be a partial sum
if input channels are split. Pieces of a spatial dim are extended by halos (`autoshard.rules.halo`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import compress
from typing import Any

import torch

from autoshard.rules.dims import all_blocked
from autoshard.rules.halo import (
    Halo,
    HaloWindow,
    each,
    exchanged,
    extend_all,
    fold_all,
    inner_padding,
    sliding,
    split_halos,
    stride_factors,
    window_factors,
)
from autoshard.rules.local import LocalContext
from autoshard.rules.notation import Dims, Rule
from autoshard.rules.registry import sharding_rule

aten = torch.ops.aten

_OUT_CHANNELS = ("g", "o")

_FIRST = 2
"""Index of the first spatial dim."""


def _windows(
    x: torch.Tensor, weight: torch.Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    transposed: bool, output_padding: Sequence[int],
) -> tuple[HaloWindow, ...]:  # fmt: skip
    """Return the windows of each spatial dim.

    They slide over the operand, or over the result of a transposed convolution. Halos of complex numbers are not
    exchanged, so spatial dims of complex operands cannot be split.
    """
    size, kernel, space = x.shape[_FIRST:], weight.shape[_FIRST:], x.dim() - _FIRST
    options = [each(option, space) for option in (stride, padding, dilation, output_padding)]
    result = [
        (n - 1) * s - 2 * p + d * (k - 1) + o + 1 if transposed else (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d, o in zip(size, kernel, *options, strict=True)
    ]
    sides = (result, size) if transposed else (size, result)
    return sliding(*sides, kernel, stride, padding, dilation, is_plain=not x.is_complex())


def _operand_dims(windows: Sequence[HaloWindow], *, transposed: bool) -> tuple[Dims, Dims, Dims]:
    """Return the dims of the operand, the weight and the result.

    Factors: n batch, g groups, i input channels of a group, o output channels of a group, and the factors of `windows`.
    """
    sides = (tuple(window.elements for window in windows), tuple(window.windows for window in windows))
    x_space, result_space = reversed(sides) if transposed else sides
    channels = (("g", "i"), ("o",)) if transposed else (_OUT_CHANNELS, ("i",))
    weight = (*channels, *all_blocked(len(windows)))
    return (("n",), ("g", "i"), *x_space), weight, (("n",), _OUT_CHANNELS, *result_space)


def _needed(window: HaloWindow) -> Halo:
    """Return the halo of the operand that a rank needs to compute its piece of a transposed convolution's result.

    Element i of the operand adds to the elements i s - p + d j of the result, for stride s, padding p, dilation d and
    j < kernel.
    """
    left = max(0, (window.extent - 1 - window.padding) // window.stride)
    return Halo(window.dim, window.factor, 1, left, -(-window.padding // window.stride))


@sharding_rule(aten.convolution.default)
def convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int,
) -> Rule:  # fmt: skip
    windows = _windows(x, weight, stride, padding, dilation, transposed, output_padding)
    x_dims, weight_dims, result = _operand_dims(windows, transposed=transposed)
    bias_dims = () if bias is None else ((_OUT_CHANNELS,),)
    fitting = [window for window in windows if window.fits]
    halos = [_needed(window) if transposed else window.halo for window in fitting]
    return Rule(
        ((x_dims, weight_dims, *bias_dims), (result,)),
        sizes={"g": groups, **stride_factors(windows)},
        reduce={"i": "sum"},
        added=() if bias is None else (2,),
        linear=[(0,), (1,)] if bias is None else [(0, 2), (1, 2)],
        blocked=tuple(stride_factors(windows)),
        exchanged=exchanged(halos),
        local=partial(_local_transposed, windows=fitting) if transposed else partial(_local_convolution, halos=halos),
        padding={},
        even=window_factors(windows),
    )


def _local_convolution(
    context: LocalContext, x: Any, weight: Any, bias: Any, stride: Any, padding: Any, *rest: Any, halos: Sequence[Halo]
) -> Any:
    """Emit a convolution of the rank's piece, extended by halos. `rest` ends with the number of groups."""
    *others, _ = rest
    split = split_halos(context, halos)
    x = extend_all(context, x, split, 0)
    return context.default(x, weight, bias, stride, _inner(context, padding, split), *others, context.local_size("g"))


def _local_transposed(
    context: LocalContext, x: Any, weight: Any, bias: Any, stride: Any, padding: Any, *rest: Any,
    windows: Sequence[HaloWindow],
) -> Any:  # fmt: skip
    """Emit a transposed convolution of the rank's piece with halos, and cut the result to the rank's piece.

    `rest` ends with the number of groups.
    """
    *others, _ = rest
    split = [window for window in windows if context.shards(window.factor) > 1]
    halos = [_needed(window) for window in split]
    x = extend_all(context, x, halos, 0)
    padding = _inner(context, padding, halos)
    result = context.default(x, weight, bias, stride, padding, *others, context.local_size("g"))
    for window, halo in zip(split, halos, strict=True):
        start = window.padding + halo.left * window.stride
        result = context.call(aten.narrow.default, result, window.dim, start, window.halo.size(context))
    return result


def _inner(context: LocalContext, padding: Sequence[int], extended: Sequence[Halo]) -> list[int]:
    return inner_padding(padding, len(context.input_shape(0)) - _FIRST, extended)


@sharding_rule(aten.convolution_backward.default)
def convolution_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias_sizes: Sequence[int] | None, stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int,
    output_mask: Sequence[bool],
) -> Rule:  # fmt: skip
    """Return the rule of the backward of a convolution.

    The gradient of the bias does not depend on input channels, so it stays whole if input channels are split.
    """
    windows = _windows(x, weight, stride, padding, dilation, transposed, output_padding)
    x_dims, weight_dims, result = _operand_dims(windows, transposed=transposed)
    gradients = (x_dims, weight_dims, (_OUT_CHANNELS,))
    of_bias = sum(output_mask[:2])
    halos = [window.halo for window in windows if window.fits]
    return Rule(
        (
            (result, x_dims, weight_dims),
            tuple(compress(gradients, output_mask)),
        ),
        sizes={"g": groups, **stride_factors(windows)},
        reduce=dict.fromkeys(("n", "o", "i", *window_factors(windows)), "sum"),
        whole={"i": (of_bias,)} if output_mask[2] else None,
        linear=[(0,)],
        blocked=tuple(stride_factors(windows)),
        exchanged=exchanged(halos),
        local=partial(_local_transposed_backward if transposed else _local_convolution_backward, halos=halos),
        padding={},
        even=window_factors(windows),
    )


def _local_convolution_backward(
    context: LocalContext, grad: Any, x: Any, weight: Any, bias_sizes: Any, stride: Any, padding: Any, *rest: Any,
    halos: Sequence[Halo],
) -> Any:  # fmt: skip
    """Emit the backward: extend the operand by halos, then send the gradients of halos back to the neighbours.

    `rest` ends with the number of groups and output_mask.
    """
    *others, _, output_mask = rest
    split = split_halos(context, halos)
    options = (stride, _inner(context, padding, split), *others, context.local_size("g"), output_mask)
    x = extend_all(context, x, split, 0)
    gradients = context.default(grad, x, weight, _local_channels(context, bias_sizes), *options)
    if not split or not output_mask[0]:
        return gradients
    rest_asked = (gradients[index] if output_mask[index] else None for index in (1, 2))
    return (fold_all(context, gradients[0], split), *rest_asked)


def _local_transposed_backward(
    context: LocalContext, grad: Any, x: Any, weight: Any, bias_sizes: Any, stride: Any, padding: Any, *rest: Any,
    halos: Sequence[Halo],
) -> Any:  # fmt: skip
    """Emit the backward of a transposed convolution: extend the gradient of the result by halos.

    The gradient of the operand is a convolution of the gradient of the result. The gradient of the bias is summed
    before the extension, because the bias was added only to the rank's own piece.
    """
    dilation, transposed, output_padding, _, output_mask = rest
    split, groups = split_halos(context, halos), context.local_size("g")
    if not split:
        channels = _local_channels(context, bias_sizes)
        return context.default(
            grad, x, weight, channels, stride, padding, dilation, transposed, output_padding, groups, output_mask
        )
    of_operands: Any = (None, None)
    of_bias = None
    if output_mask[2]:
        space = range(_FIRST, len(context.input_shape(0)))
        of_bias = context.call(aten.sum.dim_IntList, grad, [0, *space])
    if any(output_mask[:2]):
        grad = extend_all(context, grad, split, 0)
        inner = (_inner(context, padding, split), dilation, transposed, _inner(context, output_padding, split))
        of_operands = context.default(grad, x, weight, None, stride, *inner, groups, [*output_mask[:2], False])
    return (*(of_operands[index] if output_mask[index] else None for index in (0, 1)), of_bias)


def _local_channels(context: LocalContext, bias_sizes: Sequence[int] | None) -> list[int] | None:
    return None if bias_sizes is None else context.input_shape(0)[1:2]
