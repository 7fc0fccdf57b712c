"""Memory that an operator takes during its call, beside operands and results, for the operators that take much.

Expert layers sort rows by expert and keep intermediate values. Ring attention keeps keys and values of other ranks. All
other operators are counted by operands and results alone.
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
    """The most bytes beside operands and results while a call runs, whose operands are local values."""
    return workspace_of(node, operand_infos(node)) if has_workspace(node) else 0


def workspace_of(node: fx.Node, operands: Sequence[TensorInfo]) -> int:
    """The same for a call that has a workspace, with operands of other sizes."""
    count = _count_of(node.target)
    assert count is not None, "the call has a workspace"
    arguments = tuple(fx.map_arg(node.args, lambda argument: None))
    return round(count(list(operands), arguments))


@cache
def _count_of(target: Any) -> Callable[..., float] | None:
    """The formula of an operator, if there is one; cached, since walks need it at every node."""
    return WORKSPACE_BYTES.get(str(target))
