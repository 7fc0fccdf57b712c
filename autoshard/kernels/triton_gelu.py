"""Gelu of x + bias, and its backward, each in one kernel that reads its operands once.

    out = gelu(x + bias),    dx = dout gelu'(x + bias)

The formulas of gelu are in `triton_activations.py`. The gradient of the bias, the sum of dx over rows, stays a separate
operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autoshard.kernels.kernel import EXAMPLE_COLUMNS, Form, FusedKernel, example
from autoshard.kernels.launch import as_rows, launch, over_pieces, refuse_dtypes, require
from autoshard.kernels.library import define
from autoshard.kernels.tanh_gelu import written_out, written_out_backward
from autoshard.kernels.triton_activations import activate, piece, piece_tile, refuse_activation, slope

_aten = torch.ops.aten


@triton.jit
def bias_gelu_forward_kernel(
    x_ptr,
    bias_ptr,
    out_ptr,
    rows,
    columns,
    x_stride,
    ACTIVATION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compute a tile of gelu(x + bias).

    x_ptr and out_ptr are [rows, columns], and out_ptr is contiguous. bias_ptr is [columns].
    """
    row, column, inside = piece(rows, columns, BLOCK_R, BLOCK_C)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(bias_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * columns + column, activate(x, ACTIVATION), mask=inside)


@triton.jit
def bias_gelu_backward_kernel(
    grad_out_ptr,
    x_ptr,
    bias_ptr,
    grad_ptr,
    rows,
    columns,
    grad_out_stride,
    x_stride,
    ACTIVATION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compute a tile of the gradient of x.

    grad_out_ptr, x_ptr and grad_ptr are [rows, columns], and grad_ptr is contiguous. bias_ptr is [columns].
    """
    row, column, inside = piece(rows, columns, BLOCK_R, BLOCK_C)
    grad_out = tl.load(grad_out_ptr + row * grad_out_stride + column, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(bias_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
    tl.store(grad_ptr + row * columns + column, grad_out * slope(x, ACTIVATION), mask=inside)


def why_not_bias_gelu(x: Tensor, bias: Tensor, shape: Sequence[int], activation: str) -> str | None:
    """Return why `triton_bias_gelu` cannot take these operands, or None if it can."""
    return _refuse(x, bias, activation) or _refuse_shape("shape", shape, x)


def why_not_bias_gelu_backward(grad_out: Tensor, x: Tensor, bias: Tensor, activation: str) -> str | None:
    """Return why `triton_bias_gelu_backward` cannot take these operands, or None if it can."""
    reason = _refuse(x, bias, activation) or _refuse_shape("grad_out", grad_out.shape, x)
    return reason or refuse_dtypes(grad_out=grad_out)


def _refuse(x: Tensor, bias: Tensor, activation: str) -> str | None:
    reason = refuse_dtypes(x=x, bias=bias) or refuse_activation(activation)
    if reason is None and (x.numel() == 0 or x.dim() == 0 or tuple(bias.shape) != tuple(x.shape[-1:])):
        return f"the kernel takes a bias of x's last dim; found x={tuple(x.shape)}, bias={tuple(bias.shape)}."
    return reason


def _refuse_shape(name: str, shape: Sequence[int], x: Tensor) -> str | None:
    """Return why the rows of the tensor `name`, of this `shape`, do not match the rows of `x`, or None if they match.

    Rows match if they are as many and as long.
    """
    if len(shape) > 0 and shape[-1] == x.shape[-1] and torch.Size(shape).numel() == x.numel():
        return None
    return f"{name}={tuple(shape)} does not have the rows of x={tuple(x.shape)}."


def _bias_gelu(x: Tensor, bias: Tensor, shape: Sequence[int], activation: str) -> Tensor:
    require("triton_bias_gelu", why_not_bias_gelu(x, bias, shape, activation))
    out = _bias_gelu_fake(x, bias, shape, activation)
    columns = x.shape[-1]
    rows, tile = as_rows(x, columns), piece_tile(columns)
    launch(
        bias_gelu_forward_kernel,
        over_pieces(rows.shape[0], columns),
        x.device,
        *(rows, bias.contiguous(), out, rows.shape[0], columns, rows.stride(0)),
        ACTIVATION=activation,
        BLOCK_R=tile.rows,
        BLOCK_C=tile.columns,
        num_warps=tile.num_warps,
    )
    return out


def _bias_gelu_fake(x: Tensor, bias: Tensor, shape: Sequence[int], activation: str) -> Tensor:
    return x.new_empty(shape)


def _bias_gelu_backward(grad_out: Tensor, x: Tensor, bias: Tensor, activation: str) -> Tensor:
    require("triton_bias_gelu_backward", why_not_bias_gelu_backward(grad_out, x, bias, activation))
    grad = _bias_gelu_backward_fake(grad_out, x, bias, activation)
    columns = x.shape[-1]
    grads, rows, tile = as_rows(grad_out, columns), as_rows(x, columns), piece_tile(columns)
    launch(
        bias_gelu_backward_kernel,
        over_pieces(rows.shape[0], columns),
        x.device,
        *(grads, rows, bias.contiguous(), grad, rows.shape[0], columns, grads.stride(0), rows.stride(0)),
        ACTIVATION=activation,
        BLOCK_R=tile.rows,
        BLOCK_C=tile.columns,
        num_warps=tile.num_warps,
    )
    return grad


def _bias_gelu_backward_fake(grad_out: Tensor, x: Tensor, bias: Tensor, activation: str) -> Tensor:
    return x.new_empty(grad_out.shape)


bias_gelu = define(
    "triton_bias_gelu",
    "(Tensor x, Tensor bias, SymInt[] shape, str activation) -> Tensor",
    _bias_gelu,
    _bias_gelu_fake,
)
bias_gelu_backward = define(
    "triton_bias_gelu_backward",
    "(Tensor grad_out, Tensor x, Tensor bias, str activation) -> Tensor",
    _bias_gelu_backward,
    _bias_gelu_backward_fake,
)


def _rows(like: Tensor, x: Any, bias: Any) -> Any:
    return _aten.reshape.default(_aten.add.Tensor(x, bias), list(like.shape))


def _same(like: Tensor, x: Any, bias: Any) -> Any:
    return _aten.add.Tensor(x, bias)


def _add_of(rank_changes: bool) -> Any:
    return _rows if rank_changes else _same


def _forward_form(rank_changes: bool, activation: str) -> Form:
    """Return the `Form` of gelu(x + bias). If `rank_changes`, the sum is reshaped before the gelu."""
    add = _add_of(rank_changes)

    def compose(like: Tensor, x: Any, bias: Any) -> Any:
        z = add(like, x, bias)
        if activation == "written_out":
            return written_out(z)[0]
        return _aten.gelu.default(z, **_APPROXIMATE[activation])

    return Form(compose, lambda like: {"shape": list(like.shape), "activation": _name(activation)})


def _backward_form(rank_changes: bool, activation: str) -> Form:
    add = _add_of(rank_changes)

    def compose(like: Tensor, grad_out: Any, x: Any, bias: Any) -> Any:
        z = add(like, x, bias)
        if activation == "written_out":
            return written_out_backward(grad_out, z)
        return _aten.gelu_backward.default(grad_out, z, **_APPROXIMATE[activation])

    return Form(compose, lambda like: {"activation": _name(activation)})


_APPROXIMATE = {"gelu": {}, "gelu_tanh": {"approximate": "tanh"}}
_KINDS = [(rank_changes, kind) for rank_changes in (False, True) for kind in ("gelu", "gelu_tanh", "written_out")]


def _name(activation: str) -> str:
    return "gelu" if activation == "gelu" else "gelu_tanh"


FUSED = (
    FusedKernel(
        bias_gelu_backward,
        why_not_bias_gelu_backward,
        tuple(_backward_form(*kind) for kind in _KINDS),
        tuple(
            example(
                bias_gelu_backward_kernel,
                "*bf16 *bf16 *bf16 *bf16 i32 i32 i32 i32",
                piece_tile(columns),
                columns,
                ACTIVATION="gelu",
            )
            for columns in EXAMPLE_COLUMNS
        ),
    ),
    FusedKernel(
        bias_gelu,
        why_not_bias_gelu,
        tuple(_forward_form(*kind) for kind in _KINDS),
        tuple(
            example(
                bias_gelu_forward_kernel,
                "*bf16 *bf16 *bf16 i32 i32 i32",
                piece_tile(columns),
                columns,
                ACTIVATION="gelu",
            )
            for columns in EXAMPLE_COLUMNS
        ),
    ),
)
