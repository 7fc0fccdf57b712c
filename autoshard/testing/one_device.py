"""Run a traced program on one device, value by value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.node import Argument, Target

_aten = torch.ops.aten
STRIDE_FREE: Mapping[Any, Any] = {
    _aten.view.default: _aten.reshape.default,
    _aten._unsafe_view.default: _aten.reshape.default,
}
"""What may be called in place of a view, whatever the strides are."""


class OneDevice(fx.Interpreter):
    """Runs the calls of a traced program as they are, but views as reshapes.

    Kernels lay results out as they like, and not as the trace has it: batch norm of a transposed value does.
    """

    def call_function(self, target: Target, args: tuple[Argument, ...], kwargs: dict[str, Any]) -> Any:
        """The call's result."""
        return super().call_function(STRIDE_FREE.get(target, target), args, kwargs)
