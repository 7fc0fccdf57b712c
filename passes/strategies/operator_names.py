"""The names by which the cost models know operators and dtypes."""

from __future__ import annotations

import torch
from torch import fx

from autoshard.ir.program import describe


def operator_name(node: fx.Node) -> str:
    """The name by which the cost models know a call's operator: "aten.mm.default"."""
    return str(node.target) if isinstance(node.target, torch._ops.OpOverload) else getattr(node.target, "__name__", "")


def dtype_name(dtype: torch.dtype) -> str:
    """The cost models' name of a dtype: "bf16"."""
    return describe(torch.empty((), dtype=dtype, device="meta")).partition("[")[0]
