"""What an operator takes in memory while it runs, beside operands and results: of those of which that is much.

Layers of experts sort rows by expert and keep what is between their products. Other operators are counted by their
operands and results alone.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from cost_models.experts import WORKSPACE_BYTES
from cost_models.work import TensorInfo
from passes.strategies.enumerate_strategies import operands_of


def has_workspace(node: fx.Node) -> bool:
    """Whether what a call takes while it runs is counted."""
    return str(node.target) in WORKSPACE_BYTES


def workspace_bytes(node: fx.Node) -> int:
    """The most bytes beside operands and results while a call runs, whose operands are local values."""
    count = WORKSPACE_BYTES.get(str(node.target))
    if count is None:
        return 0
    values: list[Any] = [operand.meta["val"] for operand in operands_of(node)]
    arguments = tuple(fx.map_arg(node.args, lambda argument: None))
    return round(count([TensorInfo(tuple(value.shape), value.itemsize, "") for value in values], arguments))
