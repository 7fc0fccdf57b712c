"""`autoshard::dropout` as a Triton kernel, with the same random bits as in `dropout.py`.

Srivastava et al., "Dropout" (JMLR 2014); Salmon et al., "Parallel random numbers" (SC 2011).
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from autoshard.kernels.dropout import dropout
from autoshard.kernels.launch import as_rows, define_kernel, launch, over_pieces, row_tile
from autoshard.kernels.philox import drop_threshold, keep_scale

_MAX_DIMS = 4
_MAX_BLOCK = 1024


@triton.jit
def dropout_kernel(
    x_ptr,
    seed_ptr,
    out_ptr,
    rows,
    columns,
    size_1,
    size_2,
    x_stride,
    out_stride,
    step_0,
    step_1,
    step_2,
    start,
    site,
    threshold,
    scale,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Drop or scale a tile of x.

    x_ptr and out_ptr are [rows, columns], and rows stand for dims [*, size_1, size_2]. seed_ptr [] is int64. Row
    (i, j, k) and column l has the global index start + i step_0 + j step_1 + k step_2 + l. An element is dropped if its
    random word is below `threshold`. Otherwise it is multiplied by `scale`.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    column = tl.program_id(1).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    inside = (row < rows) & (column < columns)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    seed = tl.load(seed_ptr)
    outer = row // size_2
    first = start + row % size_2 * step_2 + outer % size_1 * step_1 + outer // size_1 * step_0
    index = first + column
    low = (index & 0xFFFFFFFF).to(tl.uint32)
    high = ((index >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zero = low ^ low
    word, _, _, _ = tl.philox(seed, low, high, zero + tl.cast(site, tl.uint32), zero)
    out = tl.where(word.to(tl.int64) >= threshold, x * scale, 0.0)
    tl.store(out_ptr + row * out_stride + column, out, mask=inside)


def _refuse(x: Tensor, **_: object) -> str | None:
    if 1 <= x.dim() <= _MAX_DIMS:
        return None
    return f"x has {x.dim()} dims; the kernel takes 1 to {_MAX_DIMS}."


def _fill(
    out: Tensor, x: Tensor, seed: Tensor, p: float, site: int, offset: Sequence[int], global_shape: Sequence[int]
) -> None:
    if x.numel() == 0:
        return
    columns = x.shape[-1]
    matrix, result = as_rows(x, columns), out.view(-1, columns)
    (_, size_1, size_2, _), (step_0, step_1, step_2), start = _place(x.shape, offset, global_shape)
    launch(
        dropout_kernel,
        over_pieces(matrix.shape[0], columns),
        x.device,
        *(matrix, seed, result, matrix.shape[0], columns, size_1, size_2),
        *(matrix.stride(0), columns, step_0, step_1, step_2, start),
        *(site, drop_threshold(p), keep_scale(p)),
        **row_tile(columns, _MAX_BLOCK).options,
    )


def _place(
    shape: Sequence[int], offset: Sequence[int], global_shape: Sequence[int]
) -> tuple[list[int], list[int], int]:
    """Return sizes, strides and start of a shard, after its dims are padded to four by dims of size 1 in front.

    The strides are those of the first three dims in the row-major global array. The start is the global number of the
    shard's first element.
    """
    missing = _MAX_DIMS - len(shape)
    sizes = [*[1] * missing, *shape]
    wholes = [*[1] * missing, *global_shape]
    steps = [1]
    for whole in reversed(wholes[1:]):
        steps.insert(0, steps[0] * whole)
    start = sum(first * step for first, step in zip(offset, steps[missing:], strict=True))
    return sizes, steps[:-1], start


triton_dropout = define_kernel(
    "triton_dropout",
    "(Tensor x, Tensor seed, float p, SymInt site, SymInt[] offset, SymInt[] global_shape) -> Tensor",
    lambda x, **_: x.new_empty(x.shape),
    _fill,
    _refuse,
)

KERNELS = {dropout: triton_dropout}
