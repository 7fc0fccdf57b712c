"""`autoshard::dequantize_nf4`: the weights that 4-bit numbers stand for, as bitsandbytes stores them for QLoRA.

A byte holds two numbers, the first in its upper bits. Each number is an index into NF4, a table of 16 values. A block
of consecutive weights has one scale, its largest magnitude. With double quantisation, a scale is a byte too. It is an
index into a second table, whose values are scaled in groups of 256 (Dettmers et al., "QLoRA", 2023).

Scales are stored as bytes whatever they hold, so that no cast of a model to another dtype changes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from autoshard.kernels.library import define

NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The values of 4-bit indices: quantiles of the normal distribution, divided by the largest (QLoRA, appendix E)."""

SCALE_VALUES = 256
"""Number of values of a scale that is stored as one byte, an index into a table of these values."""

GROUP = 256
"""The number of consecutive one-byte scales that are multiplied by the same float32 number."""

_PAIRS = torch.tensor([[NF4[byte >> 4], NF4[byte & 15]] for byte in range(256)], dtype=torch.float32, device="cpu")
"""The two weights of each byte [256, 2], before they are scaled."""

ARGUMENTS = (
    "(Tensor packed, Tensor absmax, Tensor? nested, SymInt[] shape, int blocksize, SymInt first_block, "
    "ScalarType dtype) -> Tensor"
)


class QuantizedWeight(NamedTuple):
    """The operands of `dequantize_nf4`: a weight in 4-bit numbers, or some consecutive blocks of a weight.

    All tensors are bytes (uint8), also if they hold float32 numbers.

    Args:
        packed: the 4-bit indices, two in each byte, in the order of the weights.
        absmax: the scales of the blocks here. Without `nested`, each scale is the four bytes of a float32 number. With
            `nested`, each scale is one byte, an index into the table in `nested`.
        nested: the bytes of float32 numbers for the whole weight. They are a table of `SCALE_VALUES` numbers, the mean
            of all scales, and a factor for each group of `GROUP` scales. A scale is table[index] * factor + mean. None
            if scales are float32.
        shape: the shape of the weights here.
        blocksize: the number of weights in a block, an even number.
        first_block: the index, in the whole weight, of the first block here.
        dtype: the dtype of the dequantised weights.
    """

    packed: Tensor
    absmax: Tensor
    nested: Tensor | None
    shape: Sequence[int]
    blocksize: int
    first_block: int
    dtype: torch.dtype


def dequantize_nf4_reference(*operands: Any) -> Tensor:
    """Return the dequantised weights [*shape] of type `dtype`. `operands` are the fields of `QuantizedWeight`."""
    packed, absmax, nested, shape, blocksize, first_block, dtype = QuantizedWeight(*operands)
    count = prod(shape)
    scales = _block_scales(absmax, nested, first_block)
    weights = F.embedding(packed.reshape(-1).to(torch.int32), _PAIRS.to(packed.device)).view(-1)[:count]
    if count % blocksize:
        weights = weights * scales.repeat_interleave(blocksize)[:count]
    else:
        weights.view(-1, blocksize).mul_(scales.unsqueeze(1))
    return weights.view(*shape).to(dtype)


def _block_scales(absmax: Tensor, nested: Tensor | None, first_block: int) -> Tensor:
    """Return the scale of each block [blocks] in float32."""
    if nested is None:
        return absmax.view(torch.float32)
    values, mean, groups = nested.view(torch.float32).split([SCALE_VALUES, 1, nested.numel() // 4 - SCALE_VALUES - 1])
    block = torch.arange(absmax.numel(), device=absmax.device) + first_block
    return values[absmax.to(torch.int32)] * groups[block // GROUP] + mean


def fake_weights(*operands: Any) -> Tensor:
    """Return an empty tensor with the shape, dtype and device of the weights."""
    weight = QuantizedWeight(*operands)
    return weight.packed.new_empty(weight.shape, dtype=weight.dtype)


dequantize_nf4 = define("dequantize_nf4", ARGUMENTS, dequantize_nf4_reference, fake_weights)
