"""Lists the strategies of a call that its rule allows on a mesh.

Each axis of the mesh makes one of three choices for the call. It does nothing, so that all its ranks compute the same.
Or it splits a factor. Or it carries partial sums. The specs of operands and results follow from all choices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import TypeVar

from autoshard.ir.mesh import Mesh
from autoshard.ir.spec import PartitionSpec, Reduction
from autoshard.rules.notation import BoundRule, Dims

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Split:
    """The choice of one axis to split `factor`, and at the same time the factors `others` (`Rule.together`)."""

    factor: str
    others: tuple[str, ...] = ()

    @property
    def factors(self) -> tuple[str, ...]:
        """All factors that the choice splits, `factor` first."""
        return (self.factor, *self.others)


@dataclass(frozen=True, slots=True)
class Carry:
    """The choice of one axis to carry partial sums: exactly `operands` are partial, and so are the results."""

    operands: frozenset[int]


Choice = Split | Carry | None
"""The choice of one axis for one call. With None, every rank of the axis computes the same."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to run a call on a mesh: specs of tensor operands and results, and a choice per mesh axis, in order."""

    inputs: tuple[PartitionSpec, ...]
    outputs: tuple[PartitionSpec, ...]
    choices: tuple[Choice, ...]

    def splits(self, mesh: Mesh) -> dict[str, tuple[str, ...]]:
        """Return the mesh axes that split each factor, major to minor, by factor; axes of size one are left out."""
        result: dict[str, tuple[str, ...]] = {}
        for (axis, size), choice in zip(mesh.axes, self.choices, strict=True):
            for factor in choice.factors if isinstance(choice, Split) and size > 1 else ():
                result[factor] = (*result.get(factor, ()), axis)
        return result


def replicated(rule_inputs: int, rule_outputs: int, mesh: Mesh) -> Strategy:
    """Return the strategy in which every rank computes the whole call.

    `rule_inputs` and `rule_outputs` are the numbers of operands and results.
    """
    whole = PartitionSpec()
    return Strategy((whole,) * rule_inputs, (whole,) * rule_outputs, (None,) * len(mesh.axes))


Groups = Sequence[Sequence[str]]
"""The names of a mesh's axes in order, in groups of neighbours. All axes of a group make the same choice."""


def choices_of_groups(mesh: Mesh, options: Sequence[T], groups: Groups | None = None) -> Iterator[tuple[T, ...]]:
    """Yield every tuple with one of `options` for each axis of the mesh; axes of one group have the same option."""
    sizes = [1] * len(mesh.axes) if groups is None else list(map(len, groups))
    for choices in product(options, repeat=len(sizes)):
        yield tuple(choice for choice, size in zip(choices, sizes, strict=True) for _ in range(size))


def enumerate_strategies(rule: BoundRule, mesh: Mesh, groups: Groups | None = None) -> list[Strategy]:
    """Return every strategy that `rule` admits on `mesh`, the fully replicated strategy first.

    A split factor must lead its dim in every operand and result, or all factors before it must be split to single
    elements. The number of pieces must divide the factor's size, or the rule must allow padding.
    """
    found = {}
    for choices in choices_of_groups(mesh, axis_choices(rule), groups):
        strategy = assemble_strategy(rule, mesh, choices)
        if strategy is not None:
            found.setdefault((strategy.inputs, strategy.outputs), strategy)
    return list(found.values())


def axis_choices(rule: BoundRule) -> list[Choice]:
    """Return all choices of a single mesh axis for a call: nothing (None), a `Split` or a `Carry`."""
    together = (Split(first, tuple(others)) for first, *others in rule.together)
    return [None, *(Split(factor) for factor in rule.splittable), *together, *_carries(rule)]


def _carries(rule: BoundRule) -> Iterator[Carry]:
    yield from map(Carry, rule.linear)
    if rule.transparent:
        yield Carry(frozenset({0}))


def assemble_strategy(rule: BoundRule, mesh: Mesh, choices: Sequence[Choice]) -> Strategy | None:
    """Return the strategy in which each axis of `mesh` makes its choice in `choices`.

    Return None if the choices do not fit together.
    """
    splits: dict[str, tuple[str, ...]] = {}
    for axis, choice in zip(mesh.axis_names, choices, strict=True):
        for factor in choice.factors if isinstance(choice, Split) else ():
            splits[factor] = (*splits.get(factor, ()), axis)
    if not _keeps_apart(splits, choices):
        return None
    carried = {axis: c.operands for axis, c in zip(mesh.axis_names, choices, strict=True) if isinstance(c, Carry)}
    if not all(_may_split(rule, mesh, factor, axes, bool(carried)) for factor, axes in splits.items()):
        return None
    if not all(_sums_agree(rule, output, splits, bool(carried)) for output in range(len(rule.outputs))):
        return None
    inputs = [
        _operand_spec(rule, mesh, dims, splits, _pending(rule, index, splits, carried))
        for index, dims in enumerate(rule.inputs)
    ]
    outputs = [_result_spec(rule, mesh, index, splits, carried) for index in range(len(rule.outputs))]
    if any(spec is None for spec in (*inputs, *outputs)):
        return None
    return Strategy(tuple(s for s in inputs if s), tuple(s for s in outputs if s), tuple(choices))


def _may_split(rule: BoundRule, mesh: Mesh, factor: str, axes: Sequence[str], carries_sums: bool) -> bool:
    """Whether `axes` together may split `factor`. `carries_sums` says whether other axes carry partial sums.

    Pieces must be large enough for the rewrite's communication. An uneven split needs padding that the rule allows. If
    padding is filled with another value than 0, no partial sum may be carried, because each addend would have the fill
    value.
    """
    if rule.sizes[factor] // mesh.shards(axes) < rule.exchanged.get(factor, 0):
        return False
    if rule.sizes[factor] % mesh.shards(axes) == 0:
        return True
    fills = rule.padding.get(factor)
    if fills is None or rule.sizes[factor] <= mesh.shards(axes):
        return False
    return not (carries_sums and any(fills))


def _sums_agree(rule: BoundRule, output: int, splits: Iterable[str], carries_sums: bool) -> bool:
    """Whether result `output` has at most one kind of pending reduction, because reductions do not commute.

    `splits` has the split factors, and `carries_sums` says whether some axis carries partial sums.
    """
    reductions = {rule.reduce[factor] for factor in splits if rule.is_reduced(factor, output)}
    return len(reductions | ({Reduction.SUM} if carries_sums else set())) <= 1


def _pending(
    rule: BoundRule, index: int, splits: Mapping[str, tuple[str, ...]], carried: Mapping[str, frozenset[int]]
) -> dict[str, str]:
    """Return the pending reduction of operand number `index` over each mesh axis, by axis.

    It is a sum if the axis carries the operand (`carried`). If the operand is in `BoundRule.added`, each axis that
    splits a reduced factor has the factor's reduction.
    """
    pending = {axis: Reduction.SUM.value for axis, operands in carried.items() if index in operands}
    if index in rule.added:
        reduced = (f for f in splits if any(rule.is_reduced(f, output) for output in range(len(rule.outputs))))
        pending.update({axis: rule.reduce[factor].value for factor in reduced for axis in splits[factor]})
    return pending


def _result_spec(
    rule: BoundRule, mesh: Mesh, index: int, splits: Mapping[str, tuple[str, ...]], carried: Iterable[str]
) -> PartitionSpec | None:
    partial = dict.fromkeys(carried, Reduction.SUM.value)
    for factor, axes in splits.items():
        if rule.is_reduced(factor, index):
            partial.update(dict.fromkeys(_alone(factor, axes, splits), rule.reduce[factor].value))
    return _operand_spec(rule, mesh, rule.outputs[index], splits, partial)


def _alone(factor: str, axes: Sequence[str], splits: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the axes among `axes` that split no other factor than `factor`."""
    return [axis for axis in axes if not any(axis in found for other, found in splits.items() if other != factor)]


def _keeps_apart(splits: Mapping[str, Sequence[str]], choices: Sequence[Choice]) -> bool:
    """Whether no axis splits alone a factor that some `Split` in `choices` has in its `others`.

    For example, if one axis splits tokens and, as `others`, experts, then no other axis may split experts alone.
    `splits` has the axes that split each factor.
    """
    others = {factor for choice in choices if isinstance(choice, Split) for factor in choice.others}
    return all(not _alone(factor, splits[factor], splits) for factor in others)


def _operand_spec(
    rule: BoundRule, mesh: Mesh, dims: Dims, splits: Mapping[str, tuple[str, ...]], partial: Mapping[str, str]
) -> PartitionSpec | None:
    axes = [_dim_axes(rule, mesh, dim, splits) for dim in dims]
    if None in axes:
        return None
    return _spec(tuple(axes), tuple(partial.items()))


@lru_cache(maxsize=2**16)
def _spec(axes: tuple[tuple[str, ...], ...], partial: tuple[tuple[str, str], ...]) -> PartitionSpec:
    """Return the spec with these axes for each dim and these partial axes, the same object for equal arguments."""
    return PartitionSpec(*axes, partial=dict(partial))


def _dim_axes(
    rule: BoundRule, mesh: Mesh, dim: tuple[str, ...], splits: Mapping[str, tuple[str, ...]]
) -> tuple[str, ...] | None:
    """Return the axes that split a dim, major to minor; None if no spec expresses the split.

    A factor may be split only if all factors before it in the dim are split to single elements. Otherwise a rank's
    piece of the dim would not be contiguous.
    """
    if len(dim) == 1:
        return splits.get(dim[0], ())
    axes: tuple[str, ...] = ()
    whole_before = True
    for factor in dim:
        factor_axes = splits.get(factor, ())
        if factor_axes and not whole_before:
            return None
        axes = (*axes, *factor_axes)
        whole_before = whole_before and mesh.shards(factor_axes) == rule.sizes[factor]
    return axes
