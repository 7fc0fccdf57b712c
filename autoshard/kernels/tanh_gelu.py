"""The tanh form of gelu written with pow, mul, add and tanh, as in GPT-2 (`NewGELU` of transformers).

Hendrycks and Gimpel, "Gaussian error linear units" (2016): gelu(z) = z (1 + tanh u) / 2 with
u = sqrt(2/pi) (z + 0.044715 z^3).
"""

from __future__ import annotations

from typing import Any

import torch

_aten = torch.ops.aten


def written_out(z: Any) -> tuple[Any, Any, Any]:
    """Return gelu(z) = z (1 + tanh u) / 2, tanh u and 1 + tanh u, with u = sqrt(2/pi) (z + 0.044715 z^3).

    `z` is a tensor, or a proxy of a tracer.
    """
    cubed = _aten.mul.Tensor(_aten.pow.Tensor_Scalar(z, 3.0), 0.044715)
    tanh = _aten.tanh.default(_aten.mul.Tensor(_aten.add.Tensor(z, cubed), 0.7978845608028654))
    shifted = _aten.add.Tensor(tanh, 1.0)
    return _aten.mul.Tensor(_aten.mul.Tensor(z, 0.5), shifted), tanh, shifted


def written_out_backward(grad_out: Any, z: Any) -> Any:
    """Return the gradient of z, with the operators that autograd derives from `written_out`.

    `grad_out` is the gradient of gelu(z).
    """
    _, tanh, shifted = written_out(z)
    inner = _aten.tanh_backward.default(_aten.mul.Tensor(grad_out, _aten.mul.Tensor(z, 0.5)), tanh)
    inner = _aten.mul.Tensor(inner, 0.7978845608028654)
    cubed = _aten.mul.Scalar(_aten.pow.Tensor_Scalar(z, 2.0), 3.0)
    cubed = _aten.mul.Tensor(_aten.mul.Tensor(inner, 0.044715), cubed)
    straight = _aten.mul.Tensor(_aten.mul.Tensor(grad_out, shifted), 0.5)
    return _aten.add.Tensor(_aten.add.Tensor(inner, cubed), straight)
