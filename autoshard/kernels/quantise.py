"""`autoshard::quantise` and `autoshard::dequantise_sum`: a reduction over ranks in 8 or 16 bits, summed in float32.

Ranks that sum in fewer bits quantise what they hold, exchange the pieces as they are (all-to-all), and each sums those
of its part: the codes travel, no sum is ever rounded to them (Dettmers et al., "8-bit Optimizers via Block-wise
Quantization", ICLR 2022, section 2; Micikevicius et al., "FP8 formats for deep learning", 2022, for the types).
Elements are taken in blocks of neighbours, each with a scale s = max(max |x| / top, 2^-126), in float32:

    quantise:        code = round(x / s), in the code's type        (bfloat16: code = round(x), without scales)
    dequantise_sum:  out = sum over ranks of s code

With `top` the type's largest number, what comes back differs from x by at most (`quantisation_error`)

    int8:           s / 2                     float8_e4m3fn:  max(|x| 2^-4, s 2^-10)
    bfloat16:       |x| 2^-8                  float8_e5m2:    max(|x| 2^-3, s 2^-17)

besides roundings in float32. A block with NaN or an infinity comes back as NaN. No plan has such reductions yet: both
operators are called by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from autoshard.errors import KernelError
from autoshard.kernels.library import define

SMALLEST_SCALE = 2.0**-126

TOPS: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
)
"""The largest number of each type of codes that have scales."""


def refuse_quantise(x: Tensor, dtype: torch.dtype, block: int) -> str | None:
    """The reason why these cannot be quantised, or None."""
    if dtype != torch.bfloat16 and dtype not in TOPS:
        return f"dtype={dtype} is none of {[*TOPS, torch.bfloat16]}."
    if not x.is_floating_point() or x.numel() == 0:
        return f"x must hold floating-point numbers; found {x.dtype}, {tuple(x.shape)}."
    return None if block >= 1 else f"block={block} must be positive."


def refuse_dequantise_sum(codes: Tensor, scales: Tensor, block: int) -> str | None:
    """The reason why these cannot be summed, or None."""
    if codes.dtype != torch.bfloat16 and codes.dtype not in TOPS:
        return f"codes have dtype {codes.dtype}, none of {[*TOPS, torch.bfloat16]}."
    blocks = 0 if codes.dtype == torch.bfloat16 else math.ceil(codes.shape[-1] / block)
    if codes.dim() != 2 or codes.numel() == 0 or tuple(scales.shape) != (len(codes), blocks):
        return f"codes [R, N] need scales [R, {blocks}]; found {tuple(codes.shape)} and {tuple(scales.shape)}."
    return None if scales.dtype == torch.float32 else f"scales must be float32; found {scales.dtype}."


def quantise_reference(x: Tensor, dtype: torch.dtype, block: int) -> tuple[Tensor, Tensor]:
    """Codes and scales.

    Args:
        x: any shape and float dtype.
        dtype: of the codes: int8, float8_e4m3fn, float8_e5m2, or bfloat16.
        block: elements that share a scale, neighbours in the order of x's dims; the last block may be shorter.

    Returns:
        codes, of x's shape, and scales [blocks] float32, of which bfloat16 has none.

    Raises:
        KernelError: another dtype, no elements, or a block of none.
    """
    _require("quantise", refuse_quantise(x, dtype, block))
    if dtype == torch.bfloat16:
        return x.to(dtype).clone(memory_format=torch.contiguous_format), x.new_empty(0, dtype=torch.float32)
    wide = _in_blocks(x.float().reshape(1, -1), block)[0]  # [blocks, block]
    finite = torch.where(wide.isfinite(), wide, 0.0)
    largest = finite.abs().amax(1)
    top = torch.full_like(largest, TOPS[dtype])  # a tensor: by a number, CUDA multiplies with its rounded reciprocal
    scales = (largest / top).clamp(min=SMALLEST_SCALE)
    scaled = (finite / scales[:, None]).clamp(-TOPS[dtype], TOPS[dtype])
    codes = scaled.round() if dtype == torch.int8 else scaled
    scales = torch.where(wide.isfinite().all(1), scales, torch.nan)
    return codes.to(dtype).flatten()[: x.numel()].view(x.shape), scales


def dequantise_sum_reference(codes: Tensor, scales: Tensor, dtype: torch.dtype, block: int) -> Tensor:
    """The sum over ranks of what was quantised.

    Args:
        codes: [R, N], a row of each rank.
        scales: [R, blocks] float32; [R, 0] for bfloat16.
        dtype: of the result; the sum is float32, rank after rank.
        block: as `quantise` had it.

    Returns:
        [N].

    Raises:
        KernelError: shapes or dtypes do not fit.
    """
    _require("dequantise_sum", refuse_dequantise_sum(codes, scales, block))
    wide = codes.float()
    if scales.shape[1]:
        wide = (_in_blocks(wide, block) * scales[:, :, None]).flatten(1)[:, : codes.shape[1]]
    total = torch.zeros_like(wide[0])
    for row in wide:
        total = total + row
    return total.to(dtype)


def quantisation_error(x: Tensor, scales: Tensor, dtype: torch.dtype, block: int) -> Tensor:
    """The most by which each element may differ once quantised and back, in float64; see the module's formulas."""
    size = x.double().abs()
    if dtype == torch.bfloat16:
        return size * 2.0**-8
    each = scales.double().repeat_interleave(block)[: x.numel()].view(x.shape)
    if dtype == torch.int8:
        return each / 2
    relative, smallest = (2.0**-4, 2.0**-10) if dtype == torch.float8_e4m3fn else (2.0**-3, 2.0**-17)
    return torch.maximum(size * relative, each * smallest)


def _in_blocks(rows: Tensor, block: int) -> Tensor:
    """Rows [R, N] as [R, blocks, block], the last block filled with zeros."""
    missing = -rows.shape[1] % block
    return torch.nn.functional.pad(rows, (0, missing)).unflatten(1, (-1, block))


def _require(name: str, reason: str | None) -> None:
    if reason is not None:
        raise KernelError(f"autoshard::{name} does not apply: {reason}")


def quantise_fake(x: Tensor, dtype: torch.dtype, block: int) -> tuple[Tensor, Tensor]:
    """Empty codes and scales."""
    _require("quantise", refuse_quantise(x, dtype, block))
    blocks = 0 if dtype == torch.bfloat16 else (x.numel() + block - 1) // block
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(blocks, dtype=torch.float32)


def dequantise_sum_fake(codes: Tensor, scales: Tensor, dtype: torch.dtype, block: int) -> Tensor:
    """An empty sum."""
    _require("dequantise_sum", refuse_dequantise_sum(codes, scales, block))
    return codes.new_empty(codes.shape[1], dtype=dtype)


quantise = define(
    "quantise",
    "(Tensor x, ScalarType dtype, int block) -> (Tensor codes, Tensor scales)",
    quantise_reference,
    quantise_fake,
)
dequantise_sum = define(
    "dequantise_sum",
    "(Tensor codes, Tensor scales, ScalarType dtype, int block) -> Tensor",
    dequantise_sum_reference,
    dequantise_sum_fake,
)
