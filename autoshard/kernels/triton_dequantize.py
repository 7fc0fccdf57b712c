"""`autoshard::dequantize_nf4` as a Triton kernel: it reads packed bytes and scales, and writes weights, in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from autoshard.kernels.dequantize import ARGUMENTS, GROUP, NF4, SCALE_VALUES, dequantize_nf4, fake_weights
from autoshard.kernels.launch import FLOATS, cdiv, define_kernel, launch

_BLOCK, _WARPS = 1024, 4


@triton.jit
def dequantize_nf4_kernel(
    packed_ptr,
    absmax_ptr,
    nested_ptr,
    nf4_ptr,
    out_ptr,
    weights,
    blocksize,
    first_block,
    NESTED: tl.constexpr,
    SCALE_VALUES: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write BLOCK weights.

    packed_ptr [weights / 2] has bytes, nf4_ptr [16] the values of 4-bit indices, and out_ptr [weights] the result.
    absmax_ptr [weights / blocksize] has float32 scales. With NESTED, it has indices into the first SCALE_VALUES values
    of nested_ptr. Behind these values, nested_ptr has the mean of scales, then one factor for each GROUP of scales.
    """
    weight = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = weight < weights
    block = weight // blocksize
    byte = tl.load(packed_ptr + weight // 2, mask=inside, other=0).to(tl.int32)
    index = tl.where(weight % 2 == 0, byte >> 4, byte & 15)
    value = tl.load(nf4_ptr + index)
    scale = tl.load(absmax_ptr + block, mask=inside, other=0)
    if NESTED:
        mean = tl.load(nested_ptr + SCALE_VALUES)
        group = (block + first_block) // GROUP
        of_group = tl.load(nested_ptr + SCALE_VALUES + 1 + group, mask=inside, other=0.0)
        scale = tl.load(nested_ptr + scale.to(tl.int32)) * of_group + mean
    tl.store(out_ptr + weight, value * scale, mask=inside)


def _refuse(dtype: torch.dtype, **_: object) -> str | None:
    if dtype in FLOATS:
        return None
    return f"the result has dtype {dtype}; the kernel writes float32, bfloat16 and float16."


def _fill(
    out: Tensor, packed: Tensor, absmax: Tensor, nested: Tensor | None, shape: Sequence[int], blocksize: int,
    first_block: int, dtype: torch.dtype,
) -> None:  # fmt: skip
    count = prod(shape)
    launch(
        dequantize_nf4_kernel,
        lambda blocks: (cdiv(count, blocks["BLOCK"]),),
        packed.device,
        packed.contiguous(),
        absmax.contiguous() if nested is not None else absmax.contiguous().view(torch.float32),
        None if nested is None else nested.contiguous().view(torch.float32),
        _nf4(packed.device),
        *(out, count, blocksize, first_block),
        NESTED=nested is not None,
        SCALE_VALUES=SCALE_VALUES,
        GROUP=GROUP,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )


@cache
def _nf4(device: torch.device) -> Tensor:
    return torch.tensor(NF4, device=device)


triton_dequantize_nf4 = define_kernel(
    "triton_dequantize_nf4", ARGUMENTS, lambda **operands: fake_weights(*operands.values()), _fill, _refuse
)

KERNELS = {dequantize_nf4: triton_dequantize_nf4}
