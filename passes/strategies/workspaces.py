"""Count the temporary memory of operators that need much of it during their call, beside operands and results.

Expert layers sort rows by expert and keep intermediate values. Ring attention keeps keys and values of other ranks. The
temporary memory of all other operators is counted as zero.
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
    """Whether a formula for the temporary memory of a call's operator exists."""
    return _count_of(node.target) is not None


def workspace_bytes(node: fx.Node) -> int:
    """Return the peak bytes of temporary memory on a rank during a call of a lowered program; 0 without a formula."""
    return workspace_of(node, operand_infos(node)) if has_workspace(node) else 0


def workspace_of(node: fx.Node, operands: Sequence[TensorInfo]) -> int:
    """Return the peak bytes of temporary memory of a call on a rank, if its operands have the shapes of `operands`.

    There must be a formula for the call (`has_workspace`).
    """
    count = _count_of(node.target)
    assert count is not None, "the call has a workspace"
    arguments = tuple(fx.map_arg(node.args, lambda argument: None))
    return round(count(list(operands), arguments))


@cache
def _count_of(target: Any) -> Callable[..., float] | None:
    """Return the formula for the temporary memory of an operator, or None if there is no formula.

    The result is cached, because walks over programs ask for every node.
    """
    return WORKSPACE_BYTES.get(str(target))
