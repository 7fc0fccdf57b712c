"""`autoshard::biased_product`: out = a b + bias by `torch.addmm`.

On GPUs, cuBLASLt adds the bias while it writes the product. So no second kernel reads and writes the result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autoshard.kernels.kernel import Form, FusedKernel
from autoshard.kernels.library import define

_aten = torch.ops.aten


def why_not_biased_product(a: Tensor, b: Tensor, bias: Tensor) -> str | None:
    """Return the reason that `biased_product` cannot take these operands, or None if it can."""
    if a.dim() != 2 or b.dim() != 2 or tuple(bias.shape) != (b.shape[1],):
        shapes = f"{tuple(a.shape)}, {tuple(b.shape)}, {tuple(bias.shape)}"
        return f"the library takes a [M, K], b [K, N] and bias [N]; found {shapes}."
    return None if a.dtype == b.dtype == bias.dtype else f"dtypes differ: {a.dtype}, {b.dtype}, {bias.dtype}."


def _biased_product(a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
    return torch.addmm(bias, a, b)


def _biased_product_fake(a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]))


biased_product = define(
    "biased_product", "(Tensor a, Tensor b, Tensor bias) -> Tensor", _biased_product, _biased_product_fake
)


def _sum(like: Tensor, a: Any, b: Any, bias: Any) -> Any:
    return _aten.add.Tensor(_aten.mm.default(a, b), bias)


FUSED = (
    FusedKernel(
        biased_product,
        why_not_biased_product,
        (Form(_sum, dims=2),),
        (),
        allowed_readers=frozenset(),
        keeps_place=True,
    ),
)
