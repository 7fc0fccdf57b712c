"""Memory that an operator takes while it runs, beside operands and results, for operators that take much.

A layer of experts sorts rows by expert, and keeps the values between its products. A ring of attention holds keys and
values of other ranks. For other operators only operands and results count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from torch import fx

from cost_models.operators import WORKSPACE_BYTES
from cost_models.work import TensorInfo
from passes.strategies.tensor_infos import operand_infos


def has_workspace(node: fx.Node) -> bool:
    """Whether the workspace of a call is counted."""
    return _count_of(node.target) is not None


def workspace_bytes(node: fx.Node) -> int:
    """Bytes of a call's workspace for operands of local size."""
    return workspace_of(node, operand_infos(node)) if has_workspace(node) else 0


def workspace_of(node: fx.Node, operands: Sequence[TensorInfo]) -> int:
    """Bytes of a call's workspace for operands of the given sizes."""
    count = _count_of(node.target)
    assert count is not None, "the call has a workspace"
    arguments = tuple(fx.map_arg(node.args, lambda argument: None))
    return round(count(list(operands), arguments))


@cache
def _count_of(target: Any) -> Callable[..., float] | None:
    """Return the formula of an operator's workspace, or None."""
    return WORKSPACE_BYTES.get(str(target))
