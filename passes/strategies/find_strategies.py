"""Find the strategies of a call that fit what is known of its operands, without listing all."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import product

from autoshard.ir.mesh import Mesh
from autoshard.ir.spec import PartitionSpec, Reduction
from autoshard.rules.enumeration import Carry, Choice, Split, Strategy, assemble_strategy, axis_choices
from autoshard.rules.notation import BoundRule

AxisUse = tuple[int | None, Reduction | None]
"""What an axis does to an operand: the dim that it splits, and the reduction that it awaits."""


def find_strategies(rule: BoundRule, mesh: Mesh, held: Sequence[Collection[PartitionSpec]]) -> Iterator[Strategy]:
    """The strategies of `rule` in which each axis treats every operand as one of the operand's specs does.

    They still have to be compared with the specs as a whole. Axes of size one do nothing to a value, and nothing is
    emitted for them.

    Args:
        rule: the rule of the call.
        mesh: the mesh.
        held: for each operand the specs that it is held under, without axes of size one.
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
    """What an axis does to an operand under `choice`."""
    if isinstance(choice, Split):
        dims = rule.inputs[operand]
        dim = next((index for index, factors in enumerate(dims) if not set(choice.factors).isdisjoint(factors)), None)
        is_added = operand in rule.added and any(
            rule.is_reduced(choice.factor, output) for output in range(len(rule.outputs))
        )
        return dim, rule.reduce[choice.factor] if is_added else None
    if isinstance(choice, Carry) and operand in choice.operands:
        return None, choice.reduction
    return None, None
