"""Functions that generated kernels call besides Triton's own. NaN propagates, as in PyTorch."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def larger(x, y):
    """Return max(x, y) elementwise."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def smaller(x, y):
    """Return min(x, y) elementwise."""
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest(x):
    """Return the largest element of each row of x [rows, columns], as [rows, 1]."""
    is_nan = x != x
    found = tl.max(tl.where(is_nan, -float("inf"), x), axis=1, keep_dims=True)
    return tl.where(tl.max(is_nan.to(tl.int32), axis=1, keep_dims=True) == 1, float("nan"), found)


@triton.jit
def smallest(x):
    """Return the smallest element of each row of x [rows, columns], as [rows, 1]."""
    is_nan = x != x
    found = tl.min(tl.where(is_nan, float("inf"), x), axis=1, keep_dims=True)
    return tl.where(tl.max(is_nan.to(tl.int32), axis=1, keep_dims=True) == 1, float("nan"), found)


@triton.jit
def tanh(x):
    """Return tanh x, with an error of at most 2 units in the last place.

    From |x| = 5/8 on, tanh x = sign(x) (1 - t) / (1 + t) with t = exp(-2 |x|). Below 5/8 the difference 1 - t would
    cancel, so there tanh x = x + x^3 p(x^2). The polynomial p is that of `tanhf` in Cephes: Moshier (1989), "Methods
    and Programs for Mathematical Functions". If x^2 is 0, the result is x, because the sum would lose the sign of -0.0.
    """
    t = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - t) / (1.0 + t)
    square = x * x
    series = ((-5.70498872745e-3 * square + 2.06390887954e-2) * square - 5.37397155531e-2) * square
    series = ((series + 1.33314422036e-1) * square - 3.33332819422e-1) * square
    near = tl.where(square == 0.0, x, series * x + x)
    return tl.where(tl.abs(x) < 0.625, near, tl.where(x < 0.0, -far, far))
