"""`autoshard::cross_entropy` and its backward as Triton kernels. The backward may overwrite the logits.

The formulas are those of `cross_entropy.py`. The forward walks a row once, in blocks (Milakov, Gimelshein, "Online
normalizer calculation for softmax", 2018, algorithm 3). It keeps a running maximum m and a sum s of exp(x - m):

    m' = max(m, max x),  s' = s exp(m - m') + sum_c exp(x_c - m'),  lse = m + log s

Logits may also come in chunks of classes, one launch for each chunk (`triton_linear_cross_entropy.py`). Then two
numbers of each row are carried from chunk to chunk: the log-sum-exp, and the logit that is expected under the smoothed
target, (1 - e) x_t + (e / C) sum_c x_c. The loss is their difference after the last launch.

A target that is neither a class nor `ignore_index` gives NaN, in the loss and in the row's gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from autoshard.kernels.cross_entropy import (
    ARGUMENTS,
    BACKWARD_ARGUMENTS,
    cross_entropy,
    cross_entropy_backward,
    fake_backward,
    fake_loss,
)
from autoshard.kernels.launch import as_rows, cdiv, define_kernel, launch, over_pieces, over_rows, row_tile

_MAX_BLOCK = 4096


@triton.jit
def cross_entropy_forward_kernel(
    logits_ptr,
    target_ptr,
    loss_ptr,
    lse_ptr,
    expected_logit_ptr,
    rows,
    columns,
    first,
    classes,
    logits_stride,
    ignore_index,
    smoothing,
    STEPS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compute loss and log-sum-exp of rows, over all chunks of classes up to this one.

    The chunk logits_ptr [rows, columns] has the classes from `first` on. All chunks together have `classes` classes.
    The targets target_ptr [rows] are int64. The results loss_ptr, lse_ptr and expected_logit_ptr [rows] are float32. If
    first > 0, lse_ptr and expected_logit_ptr hold the values of the earlier chunks. If one chunk has all classes,
    expected_logit_ptr is None. STEPS blocks of BLOCK_C cover the columns.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    target = tl.load(target_ptr + row, mask=row < rows, other=ignore_index)
    is_here = (target >= first) & (target < first + columns)
    place = logits_ptr + row * logits_stride + (target - first)
    at_target = tl.load(place, mask=(row < rows) & is_here, other=0.0)
    maximum = tl.full((BLOCK_R,), -float("inf"), dtype=tl.float32)
    normaliser = tl.zeros((BLOCK_R,), dtype=tl.float32)
    total = tl.zeros((BLOCK_R,), dtype=tl.float32)
    for step in range(STEPS):
        column = step * BLOCK_C + tl.arange(0, BLOCK_C)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        block = logits_ptr + row[:, None] * logits_stride + column[None, :]
        x = tl.load(block, mask=inside, other=-float("inf")).to(tl.float32)
        total += tl.sum(tl.where(inside, x, 0.0), axis=1)
        above = tl.maximum(maximum, tl.max(x, axis=1))
        # While a row has only -inf so far, subtract 0: exp(-inf - 0) = 0, not NaN.
        base = tl.where(above == -float("inf"), 0.0, above)
        normaliser = normaliser * tl.exp(maximum - base) + tl.sum(tl.exp(x - base[:, None]), axis=1)
        maximum = above
    is_empty = normaliser == 0.0
    lse = tl.where(is_empty, -float("inf"), maximum + tl.log(tl.where(is_empty, 1.0, normaliser)))
    expected_logit = (1.0 - smoothing) * at_target.to(tl.float32)
    if smoothing > 0.0:
        expected_logit += smoothing * (total / classes)
    if expected_logit_ptr is not None:
        is_known = row < tl.where(first > 0, rows, 0)
        before = tl.load(lse_ptr + row, mask=is_known, other=-float("inf"))
        above = tl.maximum(before, lse)
        base = tl.where(above == -float("inf"), 0.0, above)
        both = tl.exp(before - base) + tl.exp(lse - base)
        lse = tl.where(above == -float("inf"), above, base + tl.log(tl.where(both == 0.0, 1.0, both)))
        expected_logit += tl.load(expected_logit_ptr + row, mask=is_known, other=0.0)
        tl.store(expected_logit_ptr + row, expected_logit, mask=row < rows)
    is_class = (target >= 0) & (target < classes)
    loss = tl.where(target == ignore_index, 0.0, tl.where(is_class, lse - expected_logit, float("nan")))
    tl.store(loss_ptr + row, loss, mask=row < rows)
    tl.store(lse_ptr + row, lse, mask=row < rows)


@triton.jit
def cross_entropy_backward_kernel(
    grad_loss_ptr,
    logits_ptr,
    target_ptr,
    lse_ptr,
    grad_ptr,
    rows,
    columns,
    first,
    classes,
    logits_stride,
    grad_stride,
    ignore_index,
    smoothing,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Write the gradient of a tile of logits.

    grad_loss_ptr, target_ptr and lse_ptr are [rows]. logits_ptr and grad_ptr are [rows, columns], and may be equal.
    They have the classes from `first` on. All chunks together have `classes` classes.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.program_id(1).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    x = tl.load(logits_ptr + row[:, None] * logits_stride + column[None, :], mask=inside, other=-float("inf"))
    target = tl.load(target_ptr + row, mask=row < rows, other=ignore_index)
    lse = tl.load(lse_ptr + row, mask=row < rows, other=0.0).to(tl.float32)
    grad_loss = tl.load(grad_loss_ptr + row, mask=row < rows, other=0.0).to(tl.float32)
    is_class = (target >= 0) & (target < classes)
    grad_loss = tl.where(is_class, grad_loss, float("nan"))
    grad = tl.exp(x.to(tl.float32) - lse[:, None]) - smoothing / classes
    grad -= tl.where(first + column[None, :] == target[:, None], 1.0 - smoothing, 0.0)
    grad = tl.where((target == ignore_index)[:, None], 0.0, grad * grad_loss[:, None])
    tl.store(grad_ptr + row[:, None] * grad_stride + column[None, :], grad, mask=inside)


@dataclass(frozen=True, slots=True)
class Chunk:
    """The position of a chunk of classes: the number of its first class, and the number of classes in all chunks."""

    first: int
    classes: int


def cross_entropy_into(
    loss: Tensor,
    lse: Tensor,
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    chunk: Chunk,
    expected_logit: Tensor | None = None,
) -> None:
    """Write loss and log-sum-exp of each row, over all chunks of classes up to this one, into `loss` and `lse`.

    Args:
        loss, lse: [N] float32, contiguous. Overwritten. After the first chunk, `lse` is also read.
        logits: [N, columns], with stride 1 along columns.
        target: [N], contiguous.
        chunk: the classes of the logits. Chunks must come in order.
        expected_logit: [N] float32, written and read from chunk to chunk. None if there is only one chunk.
    """
    rows, columns = logits.shape
    launch(
        cross_entropy_forward_kernel,
        over_rows(rows),
        logits.device,
        *(logits, target, loss, lse, expected_logit, rows, columns, chunk.first, chunk.classes, logits.stride(0)),
        *(ignore_index, label_smoothing),
        follow=lambda blocks: {"STEPS": cdiv(columns, blocks["BLOCK_C"])},
        changes=() if expected_logit is None else (lse, expected_logit),
        **row_tile(columns, _MAX_BLOCK).options,
    )


def cross_entropy_backward_into(
    grad: Tensor,
    grad_loss: Tensor,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    ignore_index: int,
    label_smoothing: float,
    chunk: Chunk,
) -> None:
    """Write the gradient of a chunk's logits into `grad`, which may be `logits` itself.

    Args:
        grad: [N, columns], with stride 1 along columns. Overwritten.
        grad_loss, target, lse: [N], contiguous. `lse` is the log-sum-exp over all classes.
        logits: [N, columns], with stride 1 along columns.
    """
    rows, columns = logits.shape
    launch(
        cross_entropy_backward_kernel,
        over_pieces(rows, columns),
        logits.device,
        *(grad_loss, logits, target, lse, grad, rows, columns, chunk.first, chunk.classes),
        *(logits.stride(0), grad.stride(0), ignore_index, label_smoothing),
        changes=(grad,) if grad is logits else (),
        **row_tile(columns, _MAX_BLOCK).options,
    )


def _fill(
    results: tuple[Tensor, Tensor], logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float
) -> None:
    classes = logits.shape[1]
    rows = (as_rows(logits, classes), target.contiguous())
    cross_entropy_into(*results, *rows, ignore_index, label_smoothing, Chunk(0, classes))


def _fill_backward(
    grad: Tensor, grad_loss: Tensor, logits: Tensor, target: Tensor, lse: Tensor, ignore_index: int,
    label_smoothing: float,
) -> None:  # fmt: skip
    classes = logits.shape[1]
    rows = (grad_loss.contiguous(), as_rows(logits, classes), target.contiguous(), lse.contiguous())
    cross_entropy_backward_into(grad, *rows, ignore_index, label_smoothing, Chunk(0, classes))


triton_cross_entropy = define_kernel("triton_cross_entropy", ARGUMENTS, fake_loss, _fill)
triton_cross_entropy_backward = define_kernel(
    "triton_cross_entropy_backward", BACKWARD_ARGUMENTS, fake_backward, _fill_backward
)

KERNELS = {cross_entropy: triton_cross_entropy, cross_entropy_backward: triton_cross_entropy_backward}
