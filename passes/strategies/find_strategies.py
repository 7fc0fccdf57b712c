"""Find the strategies of a call that fit the known specs of its operands, without listing all strategies."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import product

from autoshard.ir.mesh import Mesh
from autoshard.ir.spec import PartitionSpec, Reduction
from autoshard.rules.enumeration import Carry, Choice, Split, Strategy, assemble_strategy, axis_choices
from autoshard.rules.notation import BoundRule

AxisUse = tuple[int | None, Reduction | None]
"""The dim of an operand that one mesh axis splits, and the reduction pending over the axis; None for neither."""


def find_strategies(rule: BoundRule, mesh: Mesh, held: Sequence[Collection[PartitionSpec]]) -> Iterator[Strategy]:
    """Yield the strategies of `rule` that agree with the known specs of the operands, axis by axis.

    A strategy agrees if for each axis and operand one of the operand's specs in `held` uses the axis in the same way.
    Different axes may agree with different specs, so the caller still has to compare whole specs. Axes of size one
    split nothing, and are absent from `held`.
    """
    choices = [_choices(rule, axis, size, held) for axis, size in mesh.axes]
    for combination in product(*choices):
        strategy = assemble_strategy(rule, mesh, combination)
        if strategy is not None:
            yield strategy


def _choices(rule: BoundRule, axis: str, size: int, held: Sequence[Collection[PartitionSpec]]) -> list[Choice]:
    if size == 1:
        return [None]
    uses = [{(spec.dim_of(axis), spec.reduction_over(axis)) for spec in specs} for specs in held]
    return [
        choice
        for choice in axis_choices(rule)
        if all(_use(rule, choice, operand) in uses[operand] for operand in range(len(held)))
    ]


def _use(rule: BoundRule, choice: Choice, operand: int) -> AxisUse:
    """Return how operand number `operand` uses a mesh axis for which the strategy has `choice`."""
    if isinstance(choice, Split):
        dims = rule.inputs[operand]
        dim = next((index for index, factors in enumerate(dims) if not set(choice.factors).isdisjoint(factors)), None)
        is_added = operand in rule.added and any(
            rule.is_reduced(choice.factor, output) for output in range(len(rule.outputs))
        )
        return dim, rule.reduce[choice.factor] if is_added else None
    if isinstance(choice, Carry) and operand in choice.operands:
        return None, Reduction.SUM
    return None, None
