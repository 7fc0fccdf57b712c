"""Run a traced program on one device, node by node."""

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
"""View operator → the reshape operator that runs in its place, because a view does not admit all strides."""


class OneDevice(fx.Interpreter):
    """Runs a traced program on one device. Views run as reshapes, because a view needs the strides of the trace.

    A kernel's results may have other strides than in the trace, for example batch norm of a transposed value.
    """

    def call_function(self, target: Target, args: tuple[Argument, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call of the graph; a view runs as a reshape."""
        return super().call_function(STRIDE_FREE.get(target, target), args, kwargs)
