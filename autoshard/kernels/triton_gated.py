"""Gated linear units, activation(gate) up, and their backward, each in one kernel that reads its operands once.

Shazeer, "GLU variants improve transformer" (2020): SwiGLU with silu, GeGLU with gelu. The backward needs only gate and
up. With the activation a:

    out = a(gate) up,    dgate = dout up a'(gate),    dup = dout a(gate)
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autoshard.kernels.kernel import EXAMPLE_COLUMNS, Form, FusedKernel, example
from autoshard.kernels.launch import as_rows, launch, over_pieces, refuse_dtypes, require
from autoshard.kernels.library import define
from autoshard.kernels.triton_activations import activate, piece, piece_tile, refuse_activation, slope

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


def why_not_gated(gate: Tensor, up: Tensor, activation: str) -> str | None:
    """Return why `triton_gated` cannot take these operands, or None if it can."""
    return _refuse(activation, gate=gate, up=up)


def why_not_gated_backward(grad_out: Tensor, gate: Tensor, up: Tensor, activation: str) -> str | None:
    """Return why `triton_gated_backward` cannot take these operands, or None if it can."""
    return _refuse(activation, gate=gate, up=up, grad_out=grad_out)


def _refuse(activation: str, **tensors: Tensor) -> str | None:
    reason = refuse_dtypes(**tensors) or refuse_activation(activation)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if reason is None and (len(set(shapes.values())) > 1 or 0 in shapes["gate"] or not shapes["gate"]):
        return f"the kernel takes non-empty tensors of one shape; found {shapes}."
    types = {name: tensor.dtype for name, tensor in tensors.items()}
    return reason or (
        f"the kernel takes tensors of one dtype; found {types}." if len(set(types.values())) > 1 else None
    )


def _gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    require("triton_gated", why_not_gated(gate, up, activation))
    out = _gated_fake(gate, up, activation)
    columns = gate.shape[-1]
    gates, ups, tile = as_rows(gate, columns), as_rows(up, columns), piece_tile(columns)
    launch(
        gated_forward_kernel,
        over_pieces(gates.shape[0], columns),
        gate.device,
        *(gates, ups, out, gates.shape[0], columns, gates.stride(0), ups.stride(0)),
        ACTIVATION=activation,
        BLOCK_R=tile.rows,
        BLOCK_C=tile.columns,
        num_warps=tile.num_warps,
    )
    return out


def _gated_fake(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return gate.new_empty(gate.shape)


def _gated_backward(grad_out: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    require("triton_gated_backward", why_not_gated_backward(grad_out, gate, up, activation))
    grads = _gated_backward_fake(grad_out, gate, up, activation)
    columns = gate.shape[-1]
    matrices = [as_rows(x, columns) for x in (grad_out, gate, up)]
    rows, tile = matrices[0].shape[0], piece_tile(columns)
    launch(
        gated_backward_kernel,
        over_pieces(rows, columns),
        gate.device,
        *(*matrices, *grads, rows, columns, *(x.stride(0) for x in matrices)),
        ACTIVATION=activation,
        BLOCK_R=tile.rows,
        BLOCK_C=tile.columns,
        num_warps=tile.num_warps,
    )
    return grads


def _gated_backward_fake(grad_out: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


gated = define("triton_gated", "(Tensor gate, Tensor up, str activation) -> Tensor", _gated, _gated_fake)
gated_backward = define(
    "triton_gated_backward",
    "(Tensor grad_out, Tensor gate, Tensor up, str activation) -> (Tensor grad_gate, Tensor grad_up)",
    _gated_backward,
    _gated_backward_fake,
)


def _silu(like: Tensor, gate: Any, up: Any) -> Any:
    return _aten.mul.Tensor(_aten.silu.default(gate), up)


def _gelu(like: Tensor, gate: Any, up: Any) -> Any:
    return _aten.mul.Tensor(_aten.gelu.default(gate), up)


def _gelu_tanh(like: Tensor, gate: Any, up: Any) -> Any:
    return _aten.mul.Tensor(_aten.gelu.default(gate, approximate="tanh"), up)


def _silu_backward(like: Tensor, grad_out: Any, gate: Any, up: Any) -> tuple[Any, Any]:
    grad_gate = _aten.silu_backward.default(_aten.mul.Tensor(grad_out, up), gate)
    return grad_gate, _aten.mul.Tensor(grad_out, _aten.silu.default(gate))


def _gelu_backward(like: Tensor, grad_out: Any, gate: Any, up: Any) -> tuple[Any, Any]:
    grad_gate = _aten.gelu_backward.default(_aten.mul.Tensor(grad_out, up), gate)
    return grad_gate, _aten.mul.Tensor(grad_out, _aten.gelu.default(gate))


def _gelu_tanh_backward(like: Tensor, grad_out: Any, gate: Any, up: Any) -> tuple[Any, Any]:
    grad_gate = _aten.gelu_backward.default(_aten.mul.Tensor(grad_out, up), gate, approximate="tanh")
    return grad_gate, _aten.mul.Tensor(grad_out, _aten.gelu.default(gate, approximate="tanh"))


FUSED = (
    FusedKernel(
        gated_backward,
        why_not_gated_backward,
        (
            Form(_silu_backward, lambda like: {"activation": "silu"}),
            Form(_gelu_backward, lambda like: {"activation": "gelu"}),
            Form(_gelu_tanh_backward, lambda like: {"activation": "gelu_tanh"}),
        ),
        tuple(
            example(
                gated_backward_kernel,
                "*bf16 *bf16 *bf16 *bf16 *bf16 i32 i32 i32 i32 i32",
                piece_tile(columns),
                columns,
                ACTIVATION="silu",
            )
            for columns in EXAMPLE_COLUMNS
        ),
    ),
    FusedKernel(
        gated,
        why_not_gated,
        (
            Form(_silu, lambda like: {"activation": "silu"}),
            Form(_gelu, lambda like: {"activation": "gelu"}),
            Form(_gelu_tanh, lambda like: {"activation": "gelu_tanh"}),
        ),
        tuple(
            example(
                gated_forward_kernel,
                "*bf16 *bf16 *bf16 i32 i32 i32 i32",
                piece_tile(columns),
                columns,
                ACTIVATION="silu",
            )
            for columns in EXAMPLE_COLUMNS
        ),
    ),
)
