"""Operators of layer norm and RMS norm, alone or with additions before them, by the kernels of `triton_norm.py`.

    forward:   total = x + x_bias + residual,  out = norm(total)
    backward:  dx = dresidual = residual_grad + gradient of total through the norm

`triton_layer_norm` and `triton_rms_norm` replace torch's operators. The forwards `triton_add_*` and `triton_bias_add_*`
replace a norm and the additions before it. In a pre-norm block, `total` is the residual of the next block, and
residual_grad is the gradient of `total` in the next block. The addend x_bias is the bias of a linear layer whose
product x was reduced over ranks. Its gradient, the sum of the residual's gradient over rows, is no part of a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from autoshard.kernels.launch import define_kernel, refuse_columns
from autoshard.kernels.triton_norm import norm_backward, norm_forward, statistics_of


def _refuse(
    input: Tensor | None = None, x: Tensor | None = None, normalized_shape: Sequence[int] = (), **given: Any
) -> str | None:
    rows = input if input is not None else x
    assert rows is not None, "each norm has rows"
    added = {name: given[name] for name in ("x_bias", "residual", "residual_grad") if given.get(name) is not None}
    reason = _refuse_added(rows, **added)
    if reason is not None or rows.dim() == 0:
        return reason or "the normalised tensor has no dims."
    return refuse_columns(prod(normalized_shape) if normalized_shape else rows.shape[-1])


def _refuse_added(x: Tensor, x_bias: Tensor | None = None, **others: Tensor) -> str | None:
    """Return why a kernel cannot add `others` and `x_bias` to `x`, or None if it can.

    With `x_bias`, the residual may have other leading dims than `x`.
    """
    if x_bias is not None:
        shape = others["residual"].shape
        if x.dim() == 0 or len(shape) == 0 or x.shape[-1] != shape[-1] or x.numel() != shape.numel():
            return f"x {tuple(x.shape)} and residual {tuple(shape)} have different rows."
        if x_bias.shape != x.shape[-1:]:
            return f"x_bias {tuple(x_bias.shape)} is not a row of x {tuple(x.shape)}."
        others["x_bias"] = x_bias
    elif any(item.shape != x.shape for item in others.values()):
        return f"the added tensors have shapes {tuple(x.shape)}, {[tuple(item.shape) for item in others.values()]}."
    if any(item.dtype != x.dtype for item in others.values()):
        return f"the added tensors have different dtypes: {x.dtype}, {[item.dtype for item in others.values()]}."
    return None


def _define_forward(kind: str, added: Sequence[str] = ()) -> OpOverload:
    """Define the forward of a norm of x plus the operands `added`. `kind` is "layer_norm" or "rms_norm"."""
    is_centred = kind == "layer_norm"
    affine = "Tensor? weight, Tensor? bias, float eps" if is_centred else "Tensor? weight, float? eps"
    rows = ", ".join(f"Tensor {name}" for name in ("x", *added)) if added else "Tensor input, SymInt[] normalized_shape"
    names = ["out", *(["mean"] if is_centred else []), "rstd", *(["total"] if added else [])]

    def fake(normalized_shape: Sequence[int] = (0,), **given: Any) -> tuple[Tensor, ...]:
        like = given["residual"] if added else given["input"]
        statistics = len(normalized_shape)
        return tuple(
            statistics_of(like, statistics) if name in ("mean", "rstd") else like.new_empty(like.shape)
            for name in names
        )

    def fill(
        results: tuple[Tensor, ...], weight: Tensor | None, eps: float | None, bias: Tensor | None = None, **given: Any
    ) -> None:
        x = given["x"] if added else given["input"]
        columns = x.shape[-1] if added else prod(given["normalized_shape"])
        eps = torch.finfo(torch.float32).eps if eps is None else eps
        terms = {name: given[name] for name in added}
        norm_forward(x, columns, weight, bias, eps, **terms, **dict(zip(names, results, strict=True)))

    prefix = {0: "", 1: "add_", 2: "bias_add_"}[len(added)]
    returns = ", ".join(f"Tensor {name}" for name in names)
    return define_kernel(f"triton_{prefix}{kind}", f"({rows}, {affine}) -> ({returns})", fake, fill, _refuse)


def _empty_gradients(
    input: Tensor, weight: Tensor | None, output_mask: Sequence[bool] = (True, True, True), **given: Any
) -> tuple[Tensor | None, ...]:
    shapes = {"weight": given.get("weight_shape")}
    operands = {"input": input, "weight": weight} | ({"bias": given["bias"]} if "bias" in given else {})
    return tuple(
        item.new_empty(shapes.get(name) or item.shape) if item is not None and is_wanted else None
        for (name, item), is_wanted in zip(operands.items(), output_mask, strict=False)
    )


def _fill_gradients(
    grads: tuple[Tensor | None, ...], grad_out: Tensor, input: Tensor, rstd: Tensor, weight: Tensor | None,
    mean: Tensor | None = None, residual_grad: Tensor | None = None, normalized_shape: Sequence[int] = (), **_: object,
) -> None:  # fmt: skip
    columns = prod(normalized_shape) if normalized_shape else input.shape[-1]
    wanted = dict(zip(("grad", "grad_weight", "grad_bias"), grads, strict=False))
    norm_backward(grad_out, input, columns, weight, rstd, mean=mean, residual_grad=residual_grad, **wanted)


def _define_backward(name: str, schema: str) -> OpOverload:
    return define_kernel(name, schema, _empty_gradients, _fill_gradients, _refuse)


layer_norm, add_layer_norm, bias_add_layer_norm = (
    _define_forward("layer_norm", added) for added in ((), ("residual",), ("x_bias", "residual"))
)
rms_norm, add_rms_norm, bias_add_rms_norm = (
    _define_forward("rms_norm", added) for added in ((), ("residual",), ("x_bias", "residual"))
)
layer_norm_backward = _define_backward(
    "triton_layer_norm_backward",
    "(Tensor grad_out, Tensor input, SymInt[] normalized_shape, Tensor mean, Tensor rstd, Tensor? weight, "
    "Tensor? bias, bool[3] output_mask) -> (Tensor, Tensor, Tensor)",
)
rms_norm_backward = _define_backward(
    "triton_rms_norm_backward",
    "(Tensor grad_out, Tensor input, SymInt[] normalized_shape, Tensor rstd, Tensor? weight, "
    "bool[2] output_mask) -> (Tensor, Tensor)",
)
add_layer_norm_backward = _define_backward(
    "triton_add_layer_norm_backward",
    "(Tensor grad_out, Tensor residual_grad, Tensor input, Tensor mean, Tensor rstd, Tensor weight, Tensor bias)"
    " -> (Tensor grad, Tensor grad_weight, Tensor grad_bias)",
)
add_rms_norm_backward = _define_backward(
    "triton_add_rms_norm_backward",
    "(Tensor grad_out, Tensor? residual_grad, Tensor input, Tensor rstd, Tensor weight, SymInt[] weight_shape)"
    " -> (Tensor grad, Tensor grad_weight)",
)

KERNELS = {
    torch.ops.aten.native_layer_norm.default: layer_norm,
    torch.ops.aten.native_layer_norm_backward.default: layer_norm_backward,
    torch.ops.aten._fused_rms_norm.default: rms_norm,
    torch.ops.aten._fused_rms_norm_backward.default: rms_norm_backward,
}
