"""Gelu of x + bias, and its backward, each in one kernel that reads its operands once.

    out = gelu(x + bias),    dx = dout gelu'(x + bias)

The formulas of gelu are in `triton_activations.py`. The gradient of the bias, the sum of dx over rows, stays a separate
operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autoshard.kernels.kernel import Form, FusedKernel
from autoshard.kernels.launch import define_kernel
from autoshard.kernels.tanh_gelu import written_out, written_out_backward
from autoshard.kernels.triton_activations import activate, launch_pieces, piece, refuse_activation, slope

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


def _refuse(x: Tensor, bias: Tensor, activation: str, **other: Any) -> str | None:
    if x.numel() == 0 or x.dim() == 0 or tuple(bias.shape) != tuple(x.shape[-1:]):
        return f"the kernel takes a bias of x's last dim; found x={tuple(x.shape)}, bias={tuple(bias.shape)}."
    ((name, given),) = other.items()
    shape: Sequence[int] = given.shape if isinstance(given, Tensor) else given
    if len(shape) == 0 or shape[-1] != x.shape[-1] or torch.Size(shape).numel() != x.numel():
        return f"{name}={tuple(shape)} does not have the rows of x={tuple(x.shape)}."
    return refuse_activation(activation)


def _bias_gelu(out: Tensor, x: Tensor, bias: Tensor, shape: Sequence[int], activation: str) -> None:
    launch_pieces(bias_gelu_forward_kernel, (x,), (bias.contiguous(),), (out,), activation)


def _bias_gelu_backward(grad: Tensor, grad_out: Tensor, x: Tensor, bias: Tensor, activation: str) -> None:
    launch_pieces(bias_gelu_backward_kernel, (grad_out, x), (bias.contiguous(),), (grad,), activation)


bias_gelu = define_kernel(
    "triton_bias_gelu",
    "(Tensor x, Tensor bias, SymInt[] shape, str activation) -> Tensor",
    lambda x, shape, **_: x.new_empty(shape),
    _bias_gelu,
    _refuse,
)
bias_gelu_backward = define_kernel(
    "triton_bias_gelu_backward",
    "(Tensor grad_out, Tensor x, Tensor bias, str activation) -> Tensor",
    lambda grad_out, x, **_: x.new_empty(grad_out.shape),
    _bias_gelu_backward,
    _refuse,
)


def _biased(like: Tensor, x: Any, bias: Any, is_reshaped: bool) -> Any:
    """Add the bias to x. If `is_reshaped`, x has other leading dims than `like`, and the sum is reshaped."""
    biased = _aten.add.Tensor(x, bias)
    return _aten.reshape.default(biased, list(like.shape)) if is_reshaped else biased


def _forward_form(is_reshaped: bool, kind: str) -> Form:
    """Return the `Form` of gelu(x + bias). `kind` is an activation, or "written_out": the tanh form in small calls."""

    def compose(like: Tensor, x: Any, bias: Any) -> Any:
        z = _biased(like, x, bias, is_reshaped)
        return written_out(z)[0] if kind == "written_out" else _aten.gelu.default(z, **_APPROXIMATE[kind])

    return Form(compose, lambda like: {"shape": list(like.shape), "activation": _name(kind)})


def _backward_form(is_reshaped: bool, kind: str) -> Form:
    def compose(like: Tensor, grad_out: Any, x: Any, bias: Any) -> Any:
        z = _biased(like, x, bias, is_reshaped)
        if kind == "written_out":
            return written_out_backward(grad_out, z)
        return _aten.gelu_backward.default(grad_out, z, **_APPROXIMATE[kind])

    return Form(compose, lambda like: {"activation": _name(kind)})


def _name(kind: str) -> str:
    return "gelu" if kind == "gelu" else "gelu_tanh"


_APPROXIMATE = {"gelu": {}, "gelu_tanh": {"approximate": "tanh"}}
_KINDS = tuple(product((False, True), (*_APPROXIMATE, "written_out")))

FUSED = (
    FusedKernel(bias_gelu_backward, tuple(_backward_form(*kind) for kind in _KINDS)),
    FusedKernel(bias_gelu, tuple(_forward_form(*kind) for kind in _KINDS)),
)
