"""Products of matrices in groups, as experts need them: `aten::_grouped_mm`, whose backward is made of the same calls.

Gale et al., "MegaBlocks" (2022), section 5, for why experts are one product over sorted tokens. Group g has rows
ends[g - 1], ..., ends[g] - 1 (from 0 for the first):

    over rows:   out[rows of g] = x[rows of g] weight[g]         x [M, K], weight [G, K, N], out [M, N]
    over depth:  out[g] = x[:, depth of g] y[depth of g]         x [M, K], y [K, N], out [G, M, N]

Over rows, a program finds its group by walking the ends: there are at most M / BLOCK_M + G blocks of rows, whatever the
groups' sizes, so that no size has to come to the host. Rows behind the last end are not written, as in torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autoshard.kernels.kernel import Kernel, block_specimen
from autoshard.kernels.launch import cdiv, launch, refuse_dtypes, require
from autoshard.kernels.library import define
from autoshard.kernels.triton_product import precision_of, product

_NUM_WARPS, _NUM_STAGES = 4, 3


@triton.jit
def grouped_rows_kernel(
    x_ptr,
    weight_ptr,
    ends_ptr,
    out_ptr,
    groups,
    columns,
    depth,
    x_stride_m,
    x_stride_k,
    weight_stride_g,
    weight_stride_k,
    weight_stride_n,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """x_ptr [M, K]; weight_ptr [G, K, N]; ends_ptr [G] int32; out_ptr [M, N] contiguous. Programs: blocks of rows of
    all groups, then blocks of N."""
    block = tl.program_id(0)
    # The block's group and rows; no rows where it lies behind all groups.
    group, first, last = tl.full((), 0, tl.int64), 0, 0
    begin, passed = 0, 0
    for index in range(groups):
        end = tl.load(ends_ptr + index)
        blocks = (end - begin + BLOCK_M - 1) // BLOCK_M
        is_here = (block >= passed) & (block < passed + blocks)
        group = tl.where(is_here, index, group)
        first = tl.where(is_here, begin + (block - passed) * BLOCK_M, first)
        last = tl.where(is_here, end, last)
        begin = end
        passed += blocks
    row = (first + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)[None, :]
    is_row = row < last
    weight_ptr += group * weight_stride_g
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, tl.where(first < last, depth, 0), BLOCK_K):
        inner = start + tl.arange(0, BLOCK_K)
        across, down = inner[None, :], inner[:, None]
        x = tl.load(x_ptr + row * x_stride_m + across * x_stride_k, mask=is_row & (across < depth), other=0.0)
        place = down * weight_stride_k + column * weight_stride_n
        weight = tl.load(weight_ptr + place, mask=(down < depth) & (column < columns), other=0.0)
        total += product(x, weight, PRECISION)
    tl.store(out_ptr + row * columns + column, total, mask=is_row & (column < columns))


@triton.jit
def grouped_depth_kernel(
    x_ptr,
    y_ptr,
    ends_ptr,
    out_ptr,
    rows,
    columns,
    x_stride_m,
    x_stride_k,
    y_stride_k,
    y_stride_n,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """x_ptr [M, K]; y_ptr [K, N]; ends_ptr [G] int32; out_ptr [G, M, N] contiguous. Programs: blocks of M, of N, G."""
    group = tl.program_id(2)
    begin = tl.load(ends_ptr + group - 1, mask=group > 0, other=0)
    end = tl.load(ends_ptr + group)
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(begin, end, BLOCK_K):
        inner = (start + tl.arange(0, BLOCK_K)).to(tl.int64)
        across, down = inner[None, :], inner[:, None]
        x = tl.load(x_ptr + row * x_stride_m + across * x_stride_k, mask=(row < rows) & (across < end), other=0.0)
        place = down * y_stride_k + column * y_stride_n
        y = tl.load(y_ptr + place, mask=(down < end) & (column < columns), other=0.0)
        total += product(x, y, PRECISION)
    target = (group.to(tl.int64) * rows + row) * columns + column
    tl.store(out_ptr + target, total, mask=(row < rows) & (column < columns))


def why_not_grouped_matmul(
    self: Tensor,
    mat2: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> str | None:
    """Why the kernel cannot stand in for `aten::_grouped_mm`, or None."""
    shapes = f"{tuple(self.shape)} and {tuple(mat2.shape)}"
    if offs is None or self.dim() != 2 or mat2.dim() not in (2, 3):
        return f"the kernel has groups of rows (2 by 3 dims) or of depth (2 by 2), with offs; found {shapes}."
    if bias is not None or out_dtype not in (None, self.dtype):
        return f"the kernel has no bias, and results of its operands' dtype; found bias={bias}, out_dtype={out_dtype}."
    if self.dtype != mat2.dtype or offs.dtype != torch.int32:
        return (
            f"the kernel takes operands of one dtype and offs in int32; found {self.dtype}, {mat2.dtype}, {offs.dtype}."
        )
    if 0 in (*self.shape, *mat2.shape) or self.shape[1] != mat2.shape[-2]:
        return f"the kernel takes non-empty operands that fit each other; found {shapes}."
    # torch pads rows of the result to 16 bytes, where they are not multiples of that.
    if mat2.shape[-1] * self.element_size() % 16 != 0:
        return f"the kernel takes results with rows of a multiple of 16 bytes; found {shapes} in {self.dtype}."
    return refuse_dtypes(self=self, mat2=mat2)


def _grouped_matmul(
    self: Tensor,
    mat2: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    require("triton_grouped_matmul", why_not_grouped_matmul(self, mat2, offs, bias, out_dtype))
    assert offs is not None, "refused above"
    out = _grouped_matmul_fake(self, mat2, offs, bias, out_dtype)
    groups, (rows, depth), columns = len(offs), self.shape, mat2.shape[-1]
    tile = _tile(self.dtype)
    strides = (*self.stride(), *mat2.stride())
    options: dict[str, Any] = {**tile, "num_warps": _NUM_WARPS, "num_stages": _NUM_STAGES}
    is_by_rows = mat2.dim() == 3

    def grid(blocks: Mapping[str, int]) -> tuple[int, ...]:
        sides = cdiv(rows, blocks["BLOCK_M"]), cdiv(columns, blocks["BLOCK_N"])
        return (sides[0] + groups, sides[1]) if is_by_rows else (*sides, groups)

    kernel = grouped_rows_kernel if is_by_rows else grouped_depth_kernel
    sizes = (groups, columns, depth) if is_by_rows else (rows, columns)
    operands = (self, mat2, offs.contiguous(), out)
    precision = precision_of(kernel, self.dtype)
    launch(kernel, grid, self.device, *operands, *sizes, *strides, PRECISION=precision, **options)
    return out


def _grouped_matmul_fake(
    self: Tensor,
    mat2: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    assert offs is not None, "only calls with offs are replaced"
    shape = (self.shape[0], mat2.shape[-1])
    return self.new_empty(shape if mat2.dim() == 3 else (offs.shape[0], *shape))


def _tile(dtype: torch.dtype) -> dict[str, int]:
    """Block sizes, so that nothing spills on sm_90: groups are often short, so blocks of rows are."""
    if dtype == torch.float32:
        return {"BLOCK_M": 32, "BLOCK_N": 64, "BLOCK_K": 32}
    return {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 32}


grouped_matmul = define(
    "triton_grouped_matmul",
    "(Tensor self, Tensor mat2, Tensor? offs=None, Tensor? bias=None, ScalarType? out_dtype=None) -> Tensor",
    _grouped_matmul,
    _grouped_matmul_fake,
)

KERNELS = (
    Kernel(
        torch.ops.aten._grouped_mm.default,
        grouped_matmul,
        why_not_grouped_matmul,
        tuple(
            block_specimen(kernel, types, 4096, _NUM_WARPS, _NUM_STAGES, PRECISION="tf32", **_tile(torch.bfloat16))
            for kernel, types in (
                (grouped_rows_kernel, "*bf16 *bf16 *i32 *bf16" + " i32" * 8),
                (grouped_depth_kernel, "*bf16 *bf16 *i32 *bf16" + " i32" * 6),
            )
        ),
    ),
)
