"""Sine and cosine of any float32 angle in Triton, computed in registers only.

CUDA's own functions keep a table on the stack for large angles. Here, every angle is reduced to [-pi/4, pi/4] in the
same way (Payne, Hanek, "Radian reduction for trigonometric functions", SIGNUM 1983). The reduction multiplies x by 96
bits of 1 / (2 pi), which x's exponent selects. The product's first bits are the quadrant of x, and the other bits give
the reduced angle. The polynomials on [-pi/4, pi/4] are those of Cephes (Moshier, 1992).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sine(x):
    """Return sin x for float32 x, and NaN for infinities."""
    quadrant, rest = _reduce(x)
    result = _turned(quadrant, rest)
    return tl.where(tl.abs(x) < float("inf"), tl.where(x < 0.0, -result, result), float("nan"))


@triton.jit
def cosine(x):
    """Return cos x for float32 x, and NaN for infinities."""
    quadrant, rest = _reduce(x)
    return tl.where(tl.abs(x) < float("inf"), _turned(quadrant + 1, rest), float("nan"))


@triton.jit
def _turned(quadrant, x):
    """Return sin(quadrant pi / 2 + x) for x in [-pi/4, pi/4]."""
    square = x * x
    odd = x + x * square * (-1.6666654611e-1 + square * (8.3321608736e-3 - square * 1.9515295891e-4))
    even = 4.166664568298827e-2 + square * (-1.388731625493765e-3 + square * 2.443315711809948e-5)
    even = 1.0 - 0.5 * square + square * square * even
    result = tl.where((quadrant & 1) == 1, even, odd)
    return tl.where((quadrant & 2) == 2, -result, result)


@triton.jit
def _reduce(x):
    """Return q and r in [-pi/4, pi/4] with |x| = q pi / 2 + r, for a finite x. Only q modulo 4 is meaningful."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = tl.maximum(((bits >> 23) & 0xFF) - 126, 0)  # |x| = mantissa 2^(exponent - 24)
    mantissa = ((bits & 0x7FFFFF) | 0x800000).to(tl.int64)
    first, shift = exponent >> 5, (exponent & 31).to(tl.int64)
    a, b, c, d = _word(first - 1), _word(first), _word(first + 1), _word(first + 2)
    # 96 bits of 1 / (2 pi), from the first relevant bit on, in three words.
    high = ((a << shift) & 0xFFFFFFFF) | (b >> (32 - shift))
    middle = ((b << shift) & 0xFFFFFFFF) | (c >> (32 - shift))
    low = ((c << shift) & 0xFFFFFFFF) | (d >> (32 - shift))
    # |x| in turns, times 2^64 and modulo 2^64, because whole turns do not matter.
    turned = (mantissa * high << 40) + (mantissa * middle << 8) + (mantissa * low >> 24)
    quadrant = ((turned >> 61) + 1) >> 1
    rest = (turned - (quadrant << 62)).to(tl.float32) * 3.4061215800865545e-19  # pi / 2^63
    is_small = tl.abs(x) < 0.5
    return tl.where(is_small, 0, quadrant), tl.where(is_small, tl.abs(x), rest)


@triton.jit
def _word(index):
    """Return the 32 bits of 1 / (2 pi) that follow bit number 32 `index` after the binary point, as an integer.

    For index -1, the bits are 0.
    """
    word = tl.where(index == 0, 0x28BE60DB, 0).to(tl.int64)
    word = tl.where(index == 1, 0x9391054A, word)
    word = tl.where(index == 2, 0x7F09D5F4, word)
    word = tl.where(index == 3, 0x7D4D3770, word)
    word = tl.where(index == 4, 0x36D8A566, word)
    return tl.where(index == 5, 0x4F10E410, word)
