"""Gated linear units, activation(gate) up, and their backward, each in one kernel that reads its operands once.

Shazeer, "GLU variants improve transformer" (2020): SwiGLU with silu, GeGLU with gelu. The backward needs only gate and
up. With the activation a:

    out = a(gate) up,    dgate = dout up a'(gate),    dup = dout a(gate)
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autoshard.kernels.kernel import Form, FusedKernel
from autoshard.kernels.launch import define_kernel
from autoshard.kernels.triton_activations import activate, launch_pieces, piece, refuse_activation, slope

_aten = torch.ops.aten


@triton.jit
def gated_forward_kernel(
    gate_ptr,
    up_ptr,
    out_ptr,
    rows,
    columns,
    gate_stride,
    up_stride,
    ACTIVATION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compute a tile of activation(gate) up. gate_ptr, up_ptr, out_ptr are [rows, columns]. out_ptr is contiguous."""
    row, column, inside = piece(rows, columns, BLOCK_R, BLOCK_C)
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * columns + column, activate(gate, ACTIVATION) * up, mask=inside)


@triton.jit
def gated_backward_kernel(
    grad_out_ptr,
    gate_ptr,
    up_ptr,
    grad_gate_ptr,
    grad_up_ptr,
    rows,
    columns,
    grad_out_stride,
    gate_stride,
    up_stride,
    ACTIVATION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compute a tile of both gradients. All pointers are [rows, columns]. The results' pointers are contiguous."""
    row, column, inside = piece(rows, columns, BLOCK_R, BLOCK_C)
    grad_out = tl.load(grad_out_ptr + row * grad_out_stride + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    place = row * columns + column
    tl.store(grad_gate_ptr + place, grad_out * up * slope(gate, ACTIVATION), mask=inside)
    tl.store(grad_up_ptr + place, grad_out * activate(gate, ACTIVATION), mask=inside)


def _refuse(activation: str, **tensors: Tensor) -> str | None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1 or 0 in shapes["gate"] or not shapes["gate"]:
        return f"the kernel takes non-empty tensors of one shape; found {shapes}."
    types = {name: tensor.dtype for name, tensor in tensors.items()}
    if len(set(types.values())) > 1:
        return f"the kernel takes tensors of one dtype; found {types}."
    return refuse_activation(activation)


def _gated(out: Tensor, gate: Tensor, up: Tensor, activation: str) -> None:
    launch_pieces(gated_forward_kernel, (gate, up), (), (out,), activation)


def _gated_backward(grads: tuple[Tensor, Tensor], grad_out: Tensor, gate: Tensor, up: Tensor, activation: str) -> None:
    launch_pieces(gated_backward_kernel, (grad_out, gate, up), (), grads, activation)


gated = define_kernel(
    "triton_gated",
    "(Tensor gate, Tensor up, str activation) -> Tensor",
    lambda gate, **_: gate.new_empty(gate.shape),
    _gated,
    _refuse,
)
gated_backward = define_kernel(
    "triton_gated_backward",
    "(Tensor grad_out, Tensor gate, Tensor up, str activation) -> (Tensor grad_gate, Tensor grad_up)",
    lambda gate, up, **_: (gate.new_empty(gate.shape), up.new_empty(up.shape)),
    _gated_backward,
    _refuse,
)

# From an activation to its operator, and to the operator of its gradient.
_OPERATORS: dict[str, tuple[Any, Any]] = {
    "silu": (_aten.silu.default, _aten.silu_backward.default),
    "gelu": (_aten.gelu.default, _aten.gelu_backward.default),
    "gelu_tanh": (
        partial(_aten.gelu.default, approximate="tanh"),
        partial(_aten.gelu_backward.default, approximate="tanh"),
    ),
}


def _forward_form(activation: str) -> Form:
    act, _ = _OPERATORS[activation]
    return Form(lambda like, gate, up: _aten.mul.Tensor(act(gate), up), lambda like: {"activation": activation})


def _backward_form(activation: str) -> Form:
    act, backward = _OPERATORS[activation]

    def compose(like: Tensor, grad_out: Any, gate: Any, up: Any) -> tuple[Any, Any]:
        return backward(_aten.mul.Tensor(grad_out, up), gate), _aten.mul.Tensor(grad_out, act(gate))

    return Form(compose, lambda like: {"activation": activation})


FUSED = (
    FusedKernel(gated_backward, tuple(map(_backward_form, _OPERATORS))),
    FusedKernel(gated, tuple(map(_forward_form, _OPERATORS))),
)
