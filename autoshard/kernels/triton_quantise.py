"""Quantising for reductions, and their sums in float32: see `quantise.py`.

Codes of 8-bit floating types are made and read as whole numbers, rounding half to even, because Triton has not each of
these types on every device. With M bits of mantissa and bias B, a code below 2^M is a multiple of 2^(1 - B - M); the
others are float32's own bits, cut to M of mantissa, with another bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autoshard.kernels.kernel import Kernel, Specimen, specimen
from autoshard.kernels.launch import FLOATS, launch, over_rows, refuse_dtypes, require, row_tile
from autoshard.kernels.library import define
from autoshard.kernels.quantise import (
    SMALLEST_SCALE,
    TOPS,
    dequantise_sum,
    dequantise_sum_fake,
    quantise,
    quantise_fake,
    refuse_dequantise_sum,
    refuse_quantise,
)

_MAX_BLOCK = 4096
# Bits of mantissa, and the bias of the exponent; neither for whole numbers. bfloat16 has no scales.
_FORMATS = {torch.int8: (0, 0), torch.float8_e4m3fn: (3, 7), torch.float8_e5m2: (2, 15), torch.bfloat16: (7, 127)}


@triton.jit
def encode(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """float32 x, no larger than the type's largest number, as a code of 8 bits, in int32."""
    CUT: tl.constexpr = 23 - MANTISSA
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    rounded = size + ((size >> CUT) & 1) + (2 ** (CUT - 1) - 1)
    normal = (rounded >> CUT) - ((127 - BIAS) << MANTISSA)
    # A sum with 2^(24 - B - M) has the spacing of small codes, and their numbers as its last bits.
    shifted = tl.abs(x) + 2.0 ** (24 - BIAS - MANTISSA)
    small = shifted.to(tl.int32, bitcast=True) - ((151 - BIAS - MANTISSA) << 23)
    code = tl.where(size < ((128 - BIAS) << 23), small, normal)
    return code | ((bits >> 24) & 0x80)


@triton.jit
def decode(code, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """The float32 that a code of 8 bits, in int32, stands for."""
    size = code & 0x7F
    normal = ((size << (23 - MANTISSA)) + ((127 - BIAS) << 23)).to(tl.float32, bitcast=True)
    small = size.to(tl.float32) * 2.0 ** (1 - BIAS - MANTISSA)
    value = tl.where((size >> MANTISSA) == 0, small, normal)
    return tl.where((code & 0x80) != 0, -value, value)


@triton.jit
def quantise_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    count,
    blocks,
    block,
    top,
    smallest,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """x_ptr, codes_ptr [count], codes of 8 bits as int8; scales_ptr [blocks]. Rows are blocks, BLOCK_R of a program."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    column = tl.arange(0, BLOCK_C)[None, :]
    index = row * block + column
    inside = (column < block) & (index < count)
    x = tl.load(x_ptr + index, mask=inside, other=0.0).to(tl.float32)
    if MANTISSA == 7:
        tl.store(codes_ptr + index, x, mask=inside)
    else:
        is_finite = tl.abs(x) < float("inf")
        finite = tl.where(is_finite, x, 0.0)
        largest = tl.max(tl.abs(finite), axis=1, keep_dims=True)
        scale = tl.maximum(tl.div_rn(largest, tl.zeros_like(largest) + top), smallest)
        scaled = tl.div_rn(finite, tl.broadcast_to(scale, (BLOCK_R, BLOCK_C)))
        scaled = tl.minimum(tl.maximum(scaled, -top), top)
        if MANTISSA == 0:
            code = ((scaled + 12582912.0) - 12582912.0).to(tl.int32)  # 1.5 2^23: rounds half to even
        else:
            code = encode(scaled, MANTISSA, BIAS)
        tl.store(codes_ptr + index, code.to(tl.int8), mask=inside)
        is_whole = tl.min(is_finite.to(tl.int32), axis=1, keep_dims=True) == 1
        tl.store(scales_ptr + row, tl.where(is_whole, scale, float("nan")), mask=row < blocks)


@triton.jit
def dequantise_sum_kernel(
    codes_ptr,
    scales_ptr,
    out_ptr,
    ranks,
    count,
    blocks,
    block,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """codes_ptr [ranks, count], of 8 bits as int8; scales_ptr [ranks, blocks]; out_ptr [count]. Rows are blocks."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    column = tl.arange(0, BLOCK_C)[None, :]
    index = row * block + column
    inside = (column < block) & (index < count)
    codes, scales = codes_ptr + index, scales_ptr + row
    total = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    for _ in range(ranks):
        code = tl.load(codes, mask=inside, other=0)
        if MANTISSA == 7:
            total += code.to(tl.float32)
        else:
            scale = tl.load(scales, mask=row < blocks, other=0.0)
            if MANTISSA == 0:
                total += code.to(tl.float32) * scale
            else:
                total += decode(code.to(tl.int32), MANTISSA, BIAS) * scale
        codes += count
        scales += blocks
    tl.store(out_ptr + index, total, mask=inside)


def why_not_quantise(x: Tensor, dtype: torch.dtype, block: int) -> str | None:
    """Why the kernel cannot stand in for `autoshard::quantise`, or None."""
    return refuse_quantise(x, dtype, block) or _refuse_block(block) or refuse_dtypes(x=x)


def why_not_dequantise_sum(codes: Tensor, scales: Tensor, dtype: torch.dtype, block: int) -> str | None:
    """Why the kernel cannot stand in for `autoshard::dequantise_sum`, or None."""
    reason = refuse_dequantise_sum(codes, scales, block) or _refuse_block(block)
    return reason or (None if dtype in FLOATS else f"dtype={dtype} is none of {FLOATS}.")


def _refuse_block(block: int) -> str | None:
    return None if block <= _MAX_BLOCK else f"block={block}; the kernel takes blocks of up to {_MAX_BLOCK} elements."


def _quantise(x: Tensor, dtype: torch.dtype, block: int) -> tuple[Tensor, Tensor]:
    require("triton_quantise", why_not_quantise(x, dtype, block))
    codes, scales = quantise_fake(x, dtype, block)
    count, blocks = x.numel(), triton.cdiv(x.numel(), block)
    operands = (x.contiguous(), _as_loaded(codes), scales, count, blocks, block, TOPS.get(dtype, 1.0), SMALLEST_SCALE)
    _launch(quantise_kernel, x.device, operands, dtype, blocks, block)
    return codes, scales


def _dequantise_sum(codes: Tensor, scales: Tensor, dtype: torch.dtype, block: int) -> Tensor:
    require("triton_dequantise_sum", why_not_dequantise_sum(codes, scales, dtype, block))
    out = dequantise_sum_fake(codes, scales, dtype, block)
    (ranks, count), blocks = codes.shape, triton.cdiv(codes.shape[1], block)
    operands = (_as_loaded(codes.contiguous()), scales.contiguous(), out, ranks, count, blocks, block)
    _launch(dequantise_sum_kernel, codes.device, operands, codes.dtype, blocks, block)
    return out


def _launch(
    function: Any, device: torch.device, operands: Sequence[Any], codes: torch.dtype, blocks: int, block: int
) -> None:
    """Run a kernel over so many blocks, whose codes are of this type."""
    (mantissa, bias), tile = _FORMATS[codes], row_tile(block)
    launch(
        function,
        over_rows(blocks),
        device,
        *operands,
        MANTISSA=mantissa,
        BIAS=bias,
        BLOCK_R=tile.rows,
        BLOCK_C=tile.columns,
        num_warps=tile.num_warps,
    )


def _as_loaded(codes: Tensor) -> Tensor:
    """Codes of 8 bits as int8, which every Triton loads; no copy."""
    return codes if codes.dtype == torch.bfloat16 else codes.view(torch.int8)


triton_quantise = define(
    "triton_quantise",
    "(Tensor x, ScalarType dtype, int block) -> (Tensor codes, Tensor scales)",
    _quantise,
    quantise_fake,
)
triton_dequantise_sum = define(
    "triton_dequantise_sum",
    "(Tensor codes, Tensor scales, ScalarType dtype, int block) -> Tensor",
    _dequantise_sum,
    dequantise_sum_fake,
)


def _specimens(function: Any, types: str) -> tuple[Specimen, ...]:
    """For each format, `types` having "code" where codes are."""
    return tuple(
        specimen(
            function,
            types.replace("code", "*bf16" if dtype == torch.bfloat16 else "*i8"),
            row_tile(block),
            block,
            MANTISSA=mantissa,
            BIAS=bias,
        )
        for dtype, (mantissa, bias) in _FORMATS.items()
        for block in (128, _MAX_BLOCK)
    )


KERNELS = (
    Kernel(
        quantise,
        triton_quantise,
        why_not_quantise,
        _specimens(quantise_kernel, "*bf16 code *fp32 i32 i32 i32 fp32 fp32"),
    ),
    Kernel(
        dequantise_sum,
        triton_dequantise_sum,
        why_not_dequantise_sum,
        _specimens(dequantise_sum_kernel, "code *fp32 *bf16 i32 i32 i32 i32"),
    ),
)
