"""Convert operators and dtypes of torch into the names that the cost models use."""

from __future__ import annotations

import torch
from torch import fx

from autoshard.ir.program import describe


def operator_name(node: fx.Node) -> str:
    """Return the name that the cost models use for the operator of a call, such as "aten.mm.default"."""
    return str(node.target) if isinstance(node.target, torch._ops.OpOverload) else getattr(node.target, "__name__", "")


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name that the cost models use for a dtype, such as "bf16"."""
    return describe(torch.empty((), dtype=dtype, device="meta")).partition("[")[0]
