"""The names of operators and dtypes in the cost models."""

from __future__ import annotations

import torch
from torch import fx

from autoshard.ir.program import describe


def operator_name(node: fx.Node) -> str:
    """Return the name of a call's operator in the cost models: "aten.mm.default"."""
    return str(node.target) if isinstance(node.target, torch._ops.OpOverload) else getattr(node.target, "__name__", "")


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in the cost models: "bf16"."""
    return describe(torch.empty((), dtype=dtype, device="meta")).partition("[")[0]
