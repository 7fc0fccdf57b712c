"""Products of matrices inside Triton kernels, and how they are rounded."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """a b, summed in float32; see `precision_of`."""
    if PRECISION == "wide":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision=PRECISION)


def precision_of(kernel: Any, dtype: torch.dtype) -> str:
    """How `product` rounds its operands in a kernel: never below the inputs' own type.

    "ieee" for float32. Narrower types are exact in tensor cores, whatever is said ("tf32" is what Triton takes without
    being asked); Triton's interpreter has no products of bfloat16, so there they are made float32 ("wide").
    """
    if dtype == torch.float32:
        return "ieee"
    return "tf32" if isinstance(kernel, triton.JITFunction) else "wide"
