"""What generated kernels call besides Triton's own functions. NaN goes through, as it does in PyTorch."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def larger(x, y):
    """max(x, y)."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def smaller(x, y):
    """min(x, y)."""
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest(x):
    """The largest element of each row of x [rows, columns], as [rows, 1]."""
    is_nan = x != x
    found = tl.max(tl.where(is_nan, -float("inf"), x), axis=1, keep_dims=True)
    return tl.where(tl.max(is_nan.to(tl.int32), axis=1, keep_dims=True) == 1, float("nan"), found)


@triton.jit
def smallest(x):
    """The smallest element of each row of x [rows, columns], as [rows, 1]."""
    is_nan = x != x
    found = tl.min(tl.where(is_nan, float("inf"), x), axis=1, keep_dims=True)
    return tl.where(tl.max(is_nan.to(tl.int32), axis=1, keep_dims=True) == 1, float("nan"), found)


@triton.jit
def tanh(x):
    """tanh x = sign(x) (1 - t) / (1 + t) with t = exp(-2 |x|); its series up to x^7 where that would cancel."""
    t = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - t) / (1.0 + t)
    square = x * x
    near = x * (1.0 - square * (0.3333333333 - square * (0.1333333333 - square * 0.0539682540)))
    return tl.where(tl.abs(x) < 0.125, near, tl.where(x < 0.0, -far, far))
