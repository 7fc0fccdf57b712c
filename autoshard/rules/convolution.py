"""Rules of convolutions: batch, groups and channels may be split; spatial dims are blocked (their windows overlap).

A convolution is linear in operand and weight; input channels are reduced, so a bias must be a partial sum
where they are split.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autoshard.rules.dims import all_blocked
from autoshard.rules.local import LocalContext
from autoshard.rules.notation import Dims, Rule
from autoshard.rules.registry import sharding_rule

aten = torch.ops.aten

_OUT_CHANNELS = ("g", "o")


def _operand_dims(ndim: int, *, transposed: bool) -> tuple[Dims, Dims, Dims]:
    """The dims of the operand, the weight and the result: n batch, g groups, i and o channels of a group."""
    space = all_blocked(ndim - 2)
    channels = (("g", "i"), ("o",)) if transposed else (_OUT_CHANNELS, ("i",))
    return (("n",), ("g", "i"), *space), (*channels, *space), (("n",), _OUT_CHANNELS, *space)


@sharding_rule(aten.convolution.default)
def convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int,
) -> Rule:  # fmt: skip
    x_dims, weight_dims, result = _operand_dims(x.dim(), transposed=transposed)
    bias_dims = () if bias is None else ((_OUT_CHANNELS,),)
    return Rule(
        ((x_dims, weight_dims, *bias_dims), (result,)),
        sizes={"g": groups},
        reduce={"i": "sum"},
        added=() if bias is None else (2,),
        linear=[(0,), (1,)] if bias is None else [(0, 2), (1, 2)],
        local=_local_convolution,
        padding={},
    )


def _local_convolution(context: LocalContext, *args: Any) -> Any:
    *others, _ = args
    return context.default(*others, context.local_size("g"))


@sharding_rule(aten.convolution_backward.default)
def convolution_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias_sizes: Sequence[int] | None, stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int,
    output_mask: Sequence[bool],
) -> Rule:  # fmt: skip
    """The gradient of the bias does not depend on the input channels."""
    x_dims, weight_dims, result = _operand_dims(x.dim(), transposed=transposed)
    gradients = (x_dims, weight_dims, (_OUT_CHANNELS,))
    of_bias = sum(output_mask[:2])
    return Rule(
        (
            (result, x_dims, weight_dims),
            tuple(g for g, is_asked in zip(gradients, output_mask, strict=True) if is_asked),
        ),
        sizes={"g": groups},
        reduce={"n": "sum", "o": "sum", "i": "sum"},
        whole={"i": (of_bias,)} if output_mask[2] else None,
        linear=[(0,)],
        local=_local_convolution_backward,
        padding={},
    )


def _local_convolution_backward(
    context: LocalContext, grad: Any, x: Any, weight: Any, bias_sizes: Sequence[int] | None, *rest: Any
) -> Any:
    *others, _, output_mask = rest
    channels = None if bias_sizes is None else context.input_shape(0)[1:2]
    return context.default(grad, x, weight, channels, *others, context.local_size("g"), output_mask)
