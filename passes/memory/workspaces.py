"""Memory that an operator takes while it runs, beside operands and results, where that is much.

Layers of experts sort rows by expert and keep what is between their products; a ring of attention has keys and values
of other ranks. Other operators are counted by their operands and results alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import fx

from cost_models.operators import WORKSPACE_BYTES
from passes.strategies.tensor_infos import operand_infos


def has_workspace(node: fx.Node) -> bool:
    """Whether what a call takes while it runs is counted."""
    return _count_of(node.target) is not None


def workspace_bytes(node: fx.Node) -> int:
    """The most bytes beside operands and results while a call runs, whose operands are local values."""
    count = _count_of(node.target)
    if count is None:
        return 0
    arguments = tuple(fx.map_arg(node.args, lambda argument: None))
    return round(count(operand_infos(node), arguments))


@cache
def _count_of(target: Any) -> Callable[..., float] | None:
    """The formula of an operator, if it has one; walks ask for every node."""
    return WORKSPACE_BYTES.get(str(target))
