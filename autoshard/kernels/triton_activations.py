"""Activations and their derivatives as Triton functions, and launches of pointwise kernels.

s is the logistic function. P and p are the standard normal distribution and density (Hendrycks, Gimpel, "Gaussian error
linear units", 2016, section 2). The tanh form has u = sqrt(2 / pi) (x + 0.044715 x^3):

    silu         x s(x)                             slope  s (1 + x (1 - s))
    gelu         x P(x)                             slope  P + x p
    gelu_tanh    x (1 + tanh u) / 2 = x s(2 u)      slope  s(2u) + 2 x u' s(2u) (1 - s(2u))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from autoshard.kernels.launch import as_rows, launch, over_pieces, row_tile

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
MAX_BLOCK = 1024
"""The most columns in a tile of a pointwise kernel."""


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Return the activation of float32 x. ACTIVATION is a name of `ACTIVATIONS`."""
    if ACTIVATION == "silu":
        return x * tl.sigmoid(x)
    if ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x * tl.sigmoid(2.0 * u)


@triton.jit
def slope(x, ACTIVATION: tl.constexpr):
    """Return the derivative of the activation at float32 x. ACTIVATION is a name of `ACTIVATIONS`."""
    if ACTIVATION == "silu":
        gate = tl.sigmoid(x)
        return gate * (1.0 + x * (1.0 - gate))
    if ACTIVATION == "gelu":
        density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
        return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * density
    u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    gate = tl.sigmoid(2.0 * u)
    return gate + 2.0 * x * gate * (1.0 - gate) * 0.7978845608028654 * (1.0 + 0.134145 * x * x)


@triton.jit
def piece(rows, columns, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Return the indices of a program's tile in a 2-D grid over a matrix [rows, columns].

    The results are row indices [BLOCK_R, 1] (int64), column indices [1, BLOCK_C], and a mask [BLOCK_R, BLOCK_C]. The
    mask is true inside the matrix.
    """
    row = (tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R))[:, None]
    column = (tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
    return row, column, (row < rows) & (column < columns)


def launch_pieces(
    kernel: Any, operands: Sequence[Tensor], vectors: Sequence[Tensor], results: Sequence[Tensor], activation: str
) -> None:
    """Run a pointwise kernel with an ACTIVATION over matrices, tile by tile.

    The kernel takes pointers of operands, vectors and results, the numbers of rows and columns, and the operands'
    strides.

    Args:
        operands: tensors with rows of equal length, of any leading dims.
        vectors: tensors with the elements of a row, contiguous.
        results: contiguous, overwritten.
    """
    columns = operands[0].shape[-1]
    matrices = [as_rows(x, columns) for x in operands]
    rows = matrices[0].shape[0]
    launch(
        kernel,
        over_pieces(rows, columns),
        operands[0].device,
        *(*matrices, *vectors, *results, rows, columns, *(x.stride(0) for x in matrices)),
        ACTIVATION=activation,
        **row_tile(columns, MAX_BLOCK).options,
    )


def refuse_activation(activation: str) -> str | None:
    """Return why kernels do not support the activation, or None if its name is in `ACTIVATIONS`."""
    return None if activation in ACTIVATIONS else f"activation={activation!r} is not one of {ACTIVATIONS}."
