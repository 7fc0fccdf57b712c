"""Find calls that add a value of their own to a sum over the batch, such as `addmv(bias, x.T, y)`."""

from __future__ import annotations

from torch import fx

from autoshard.rules.linearity import Range
from autoshard.rules.notation import BoundRule
from autoshard.rules.ranges import find_ranges
from passes.strategies.enumerate_strategies import operands_of

_ZERO = Range(0.0, 0.0)


def adds_constant(node: fx.Node, rule: BoundRule) -> bool:
    """Whether a call adds an operand that may not be zero to a sum over the batch.

    Each part would add the operand, but the batch adds it once. `rule` is the call's sharding rule.
    """
    if not rule.added:
        return False
    module = node.graph.owning_module
    assert module is not None, "a traced graph has a module"
    operands, ranges = operands_of(node), find_ranges(module)
    return any(ranges[operands[index]] != _ZERO for index in rule.added)
