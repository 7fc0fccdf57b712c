"""Run a traced program on one device, node by node."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.fx.node import Argument, Target

from autoshard.rules.local import stride_free


class OneDevice(fx.Interpreter):
    """Runs a traced program on one device. Views run as reshapes, because a view needs the strides of the trace.

    A kernel's results may have other strides than in the trace, for example batch norm of a transposed value.
    """

    def call_function(self, target: Target, args: tuple[Argument, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call of the graph; a view runs as a reshape."""
        return super().call_function(stride_free(target), args, kwargs)
