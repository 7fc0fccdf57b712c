"""The local parts of cross-entropy over a split vocabulary, in one pass over a rank's logits each.

Shoeybi et al., "Megatron-LM" (2019), section 3. Between them `autoshard.rules.losses` sends one number of each row: the
greatest logit before, the sum and the target's logit behind. Of a rank's classes c, with e where the target lies on
another rank, and i where it is ignored:

    forward:   total = sum_c exp(x_c - top),    expected = factor x_target        (0 where e)
    backward:  dx_c  = scale (exp(x_c - lse) - shift) + correction scale [c = target, not e]    (0 where i)
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autoshard.kernels.kernel import SPECIMEN_COLUMNS, Form, FusedKernel, specimen
from autoshard.kernels.launch import as_rows, cdiv, launch, over_pieces, over_rows, refuse_dtypes, require, row_tile
from autoshard.kernels.library import define
from autoshard.kernels.triton_activations import piece, piece_tile

_aten = torch.ops.aten
_MAX_BLOCK = 4096


@triton.jit
def split_cross_entropy_forward_kernel(
    logits_ptr,
    top_ptr,
    indices_ptr,
    elsewhere_ptr,
    total_ptr,
    expected_ptr,
    rows,
    columns,
    logits_stride,
    factor,
    STEPS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """logits_ptr [rows, columns]; top_ptr, total_ptr, expected_ptr [rows] float32; indices_ptr [rows] int64 within the
    columns; elsewhere_ptr [rows] int8. STEPS blocks of BLOCK_C cover the columns."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    is_row = row < rows
    top = tl.load(top_ptr + row, mask=is_row, other=0.0)
    total = tl.zeros((BLOCK_R,), dtype=tl.float32)
    for step in range(STEPS):
        column = step * BLOCK_C + tl.arange(0, BLOCK_C)
        inside = is_row[:, None] & (column < columns)[None, :]
        block = logits_ptr + row[:, None] * logits_stride + column[None, :]
        x = tl.load(block, mask=inside, other=-float("inf")).to(tl.float32)
        total += tl.sum(tl.exp(x - top[:, None]), axis=1)
    index = tl.load(indices_ptr + row, mask=is_row, other=0)
    is_here = is_row & (tl.load(elsewhere_ptr + row, mask=is_row, other=1) == 0)
    picked = tl.load(logits_ptr + row * logits_stride + index, mask=is_here, other=0.0).to(tl.float32)
    tl.store(total_ptr + row, total, mask=is_row)
    tl.store(expected_ptr + row, picked * factor, mask=is_row)


@triton.jit
def split_cross_entropy_backward_kernel(
    logits_ptr,
    lse_ptr,
    scale_ptr,
    indices_ptr,
    elsewhere_ptr,
    ignored_ptr,
    grad_ptr,
    rows,
    columns,
    logits_stride,
    correction,
    shift,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """logits_ptr, grad_ptr [rows, columns], the last contiguous; lse_ptr, scale_ptr [rows] float32; indices_ptr [rows]
    int64 within the columns; elsewhere_ptr, ignored_ptr [rows] int8."""
    row, column, inside = piece(rows, columns, BLOCK_R, BLOCK_C)
    x = tl.load(logits_ptr + row * logits_stride + column, mask=inside, other=-float("inf")).to(tl.float32)
    lse = tl.load(lse_ptr + row, mask=row < rows, other=0.0)
    scale = tl.load(scale_ptr + row, mask=row < rows, other=0.0)
    index = tl.load(indices_ptr + row, mask=row < rows, other=0)
    is_here = tl.load(elsewhere_ptr + row, mask=row < rows, other=1) == 0
    is_counted = tl.load(ignored_ptr + row, mask=row < rows, other=1) == 0
    grad = (tl.exp(x - lse) - shift) * scale
    grad += tl.where((column == index) & is_here, correction * scale, 0.0)
    tl.store(grad_ptr + row * columns + column, tl.where(is_counted, grad, 0.0), mask=inside)


def why_not_split_cross_entropy(
    logits: Tensor, top: Tensor, indices: Tensor, elsewhere: Tensor, factor: float
) -> str | None:
    """Why the kernel does not take these, or None."""
    return _refuse(logits, {"top": top, "indices": indices, "elsewhere": elsewhere}, {"top": top})


def why_not_split_cross_entropy_backward(
    logits: Tensor,
    lse: Tensor,
    scale: Tensor,
    indices: Tensor,
    elsewhere: Tensor,
    is_ignored: Tensor,
    correction: float,
    shift: float,
) -> str | None:
    """Why the kernel does not take these, or None."""
    rows = {"lse": lse, "scale": scale, "indices": indices, "elsewhere": elsewhere, "is_ignored": is_ignored}
    return _refuse(logits, rows, {"lse": lse, "scale": scale})


def _refuse(logits: Tensor, rows: dict[str, Tensor], wide: dict[str, Tensor]) -> str | None:
    reason = refuse_dtypes(logits=logits)
    shapes = {name: tuple(tensor.shape) for name, tensor in rows.items()}
    if reason is None and (
        logits.dim() != 2 or logits.numel() == 0 or any(x.numel() != len(logits) for x in rows.values())
    ):
        return f"the kernel takes logits [N, C] and one number of each row; found {tuple(logits.shape)}, {shapes}."
    narrow = {name: tensor.dtype for name, tensor in wide.items() if tensor.dtype != torch.float32}
    return reason or (f"the kernel takes {', '.join(wide)} in float32; found {narrow}." if narrow else None)


def _split_cross_entropy(
    logits: Tensor, top: Tensor, indices: Tensor, elsewhere: Tensor, factor: float
) -> tuple[Tensor, Tensor]:
    require("triton_split_cross_entropy", why_not_split_cross_entropy(logits, top, indices, elsewhere, factor))
    total, expected = _split_cross_entropy_fake(logits, top, indices, elsewhere, factor)
    rows, columns = logits.shape
    x, tile = as_rows(logits, columns), row_tile(columns, _MAX_BLOCK)
    launch(
        split_cross_entropy_forward_kernel,
        over_rows(rows),
        logits.device,
        *(x, top.contiguous(), indices.contiguous(), _bytes(elsewhere), total, expected),
        *(rows, columns, x.stride(0), factor),
        follow=lambda blocks: {"STEPS": cdiv(columns, blocks["BLOCK_C"])},
        BLOCK_R=tile.rows,
        BLOCK_C=tile.columns,
        num_warps=tile.num_warps,
    )
    return total, expected


def _split_cross_entropy_fake(
    logits: Tensor, top: Tensor, indices: Tensor, elsewhere: Tensor, factor: float
) -> tuple[Tensor, Tensor]:
    total, expected = (logits.new_empty((logits.shape[0],), dtype=torch.float32) for _ in range(2))
    return total, expected


def _split_cross_entropy_backward(
    logits: Tensor,
    lse: Tensor,
    scale: Tensor,
    indices: Tensor,
    elsewhere: Tensor,
    is_ignored: Tensor,
    correction: float,
    shift: float,
) -> Tensor:
    arguments = (logits, lse, scale, indices, elsewhere, is_ignored, correction, shift)
    require("triton_split_cross_entropy_backward", why_not_split_cross_entropy_backward(*arguments))
    grad = _split_cross_entropy_backward_fake(*arguments)
    rows, columns = logits.shape
    x, tile = as_rows(logits, columns), piece_tile(columns)
    launch(
        split_cross_entropy_backward_kernel,
        over_pieces(rows, columns),
        logits.device,
        *(x, lse.contiguous(), scale.contiguous(), indices.contiguous(), _bytes(elsewhere), _bytes(is_ignored), grad),
        *(rows, columns, x.stride(0), correction, shift),
        BLOCK_R=tile.rows,
        BLOCK_C=tile.columns,
        num_warps=tile.num_warps,
    )
    return grad


def _split_cross_entropy_backward_fake(
    logits: Tensor,
    lse: Tensor,
    scale: Tensor,
    indices: Tensor,
    elsewhere: Tensor,
    is_ignored: Tensor,
    correction: float,
    shift: float,
) -> Tensor:
    return logits.new_empty(logits.shape)


def _bytes(flags: Tensor) -> Tensor:
    """Flags as int8, which every Triton loads; no copy."""
    return flags.contiguous().view(torch.int8)


split_cross_entropy = define(
    "triton_split_cross_entropy",
    "(Tensor logits, Tensor top, Tensor indices, Tensor elsewhere, float factor) -> (Tensor total, Tensor expected)",
    _split_cross_entropy,
    _split_cross_entropy_fake,
)
split_cross_entropy_backward = define(
    "triton_split_cross_entropy_backward",
    "(Tensor logits, Tensor lse, Tensor scale, Tensor indices, Tensor elsewhere, Tensor is_ignored, "
    "float correction, float shift) -> Tensor",
    _split_cross_entropy_backward,
    _split_cross_entropy_backward_fake,
)


def _forward(like: Tensor, logits: Any, top: Any, indices: Any, elsewhere: Any, factor: Any) -> tuple[Any, Any]:
    x = _aten._to_copy.default(logits, dtype=like.dtype)
    exponentials = _aten.exp.default(_aten.sub.Tensor(x, _aten.unsqueeze.default(top, 1)))
    picked = _aten.squeeze.dim(_aten.gather.default(x, 1, _aten.unsqueeze.default(indices, 1)), 1)
    expected = _aten.mul.Scalar(_aten.masked_fill.Scalar(picked, elsewhere, 0), factor)
    return _aten.sum.dim_IntList(exponentials, [1]), expected


def _shifted(
    like: Tensor,
    logits: Any,
    lse: Any,
    scale: Any,
    indices: Any,
    elsewhere: Any,
    is_ignored: Any,
    correction: Any,
    shift: Any,
) -> Any:
    """With smoothing, which takes the same from every class."""
    x = _aten._to_copy.default(logits, dtype=torch.float32)
    grad = _aten.exp.default(_aten.sub.Tensor(x, _aten.unsqueeze.default(lse, 1)))
    if shift is not None:
        grad = _aten.sub.Tensor(grad, shift)
    grad = _aten.mul.Tensor(grad, scale)
    at_target = _aten.mul.Scalar(scale, correction)
    at_target = _aten.masked_fill.Scalar(at_target, _aten.unsqueeze.default(elsewhere, 1), 0)
    grad = _aten.scatter_add.default(grad, 1, _aten.unsqueeze.default(indices, 1), at_target)
    grad = _aten.masked_fill.Scalar(grad, _aten.unsqueeze.default(is_ignored, 1), 0)
    return _aten._to_copy.default(grad, dtype=like.dtype)


def _backward(
    like: Tensor, logits: Any, lse: Any, scale: Any, indices: Any, elsewhere: Any, is_ignored: Any, correction: Any
) -> Any:
    return _shifted(like, logits, lse, scale, indices, elsewhere, is_ignored, correction, None)


FUSED = (
    FusedKernel(
        split_cross_entropy_backward,
        why_not_split_cross_entropy_backward,
        (Form(_backward, lambda like: {"shift": 0.0}, dims=2), Form(_shifted, dims=2)),
        tuple(
            specimen(
                split_cross_entropy_backward_kernel,
                "*bf16 *fp32 *fp32 *i64 *i8 *i8 *bf16 i32 i32 i32 fp32 fp32",
                piece_tile(columns),
                columns,
            )
            for columns in SPECIMEN_COLUMNS
        ),
    ),
    FusedKernel(
        split_cross_entropy,
        why_not_split_cross_entropy,
        (Form(_forward, dims=1),),
        tuple(
            specimen(
                split_cross_entropy_forward_kernel,
                "*bf16 *fp32 *i64 *i8 *fp32 *fp32 i32 i32 i32 fp32",
                row_tile(columns, _MAX_BLOCK),
                columns,
                STEPS=triton.cdiv(columns, _MAX_BLOCK),
            )
            for columns in SPECIMEN_COLUMNS
        ),
    ),
)
