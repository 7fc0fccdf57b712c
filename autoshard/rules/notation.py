"""The factor notation: the effect of an operator on indices.

Each dim of each operand and result is a product of *factors*, written major to minor. `"m k, k n -> m n"` is a matrix
product; `"(a b) c -> a b c"` is a view that splits a dim. `1` is a dim of size one without a factor. `_` is a dim that
cannot be split (each `_` is a blocked factor of its own). Factors that appear in every result are parallel. A factor
that is missing from a result while an operand has it is *reduced* there. The rule must then give its reduction
(`reduce={"k": "sum"}`) or block it.

All strategies of a call follow from its rule, by `strategies`. The idea of factors follows Shardy's sharding rules
(OpenXLA, 2024) and JAX's `custom_partitioning` rule strings. Linearity, rewrites and blocked dims are ours.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Any

from autoshard.errors import InvalidSpecError
from autoshard.ir.spec import Reduction

Fill = bool | int | float | Reduction | None
"""Fill value of padding before a call: a number, the identity of a reduction, or None to leave it unchanged."""

Dims = tuple[tuple[str, ...], ...]
"""Dims of one operand: for each dim, its factors, major to minor. `()` is a dim of size one without a factor."""

Rewrite = Callable[..., Any]
"""`rewrite(context, *args, **kwargs)`: emits the local form of a call; see `autoshard.rules.local`."""


class Beside(StrEnum):
    """Condition on an operand for a sum pending in other operands to pass, from `autoshard.rules.linearity`."""

    FINITE = "finite"
    """The pending sum is multiplied by the operand, which must be finite. The default of all operands."""

    NOT_ZERO = "not zero"
    """The pending sum is divided by the operand."""

    ANYTHING = "anything"
    """The multiplier of the pending operand is bounded for any value of this operand, or independent of it."""

    NEVER = "never"
    """Results are infinite for some finite numbers that no range tells: a logarithm, a singular matrix."""


@dataclass(frozen=True, slots=True)
class Carry:
    """An axis carries a partial value through the operands with these indices.

    Args:
        operands: operands with `reduction` pending; no other operand is partial.
        reduction: pending reduction of the operands.
        results: pending reduction of each result, None for a whole result. Left out if all have that of the operands.
    """

    operands: frozenset[int]
    reduction: Reduction
    results: tuple[Reduction | None, ...] | None = None

    def result(self, index: int) -> Reduction | None:
        """The pending reduction of result `index`."""
        return self.reduction if self.results is None else self.results[index]


@dataclass(frozen=True, slots=True)
class Rule:
    """The result of a rule function for one call: the notation, before sizes are known.

    Args:
        notation: `"m k, k n -> m n"`, or a pair of sequences of `Dims` for operands and results. Operands are the
            tensors among the call's arguments, in order, lists flattened, absent optional tensors left out.
        reduce: factor to reduction, for factors of an operand that a result lacks.
        linear: sets of operand indices in which all results are jointly linear. If exactly these operands are partial
            sums, so are the results. `[(0,), (1,)]` is a product, `[(0, 1)]` a sum, `[()]` a result that is zero.
        beside: conditions on operands outside the set for its sum to pass, `{1: Beside.NOT_ZERO}` for a quotient. The
            default condition is that the operand is finite.
        transparent: the operator only moves elements of operand 0, so any partial reduction passes through.
        carries: further ways for partial values to pass, such as a maximum through a monotone operator.
        added: operands that a result adds beside a reduced factor (the bias of `addmm`). If an axis splits the factor,
            the operands must be partial sums over the axis, or each rank would add them once.
        whole: factor to the results that lack it and are whole even if it is split. They do not depend on it, or the
            rewrite reduces it itself (`context.all_reduce`).
        exchanged: factors along which the rewrite communicates although no result lacks them (a softmax, a halo), with
            the least number of elements in each rank's piece.
        together: groups of factors that one axis may split at once, such as tokens and experts, which share no operand
            dim. The rewrite then communicates along the axis (`context.group`), and no reduction over it is pending.
        blocked: factors that cannot be split, except in a group of `together`.
        sizes: sizes of factors that shapes leave open (all but one factor of a product).
        local: rewrite that emits the local form of the call when some factor is split. None runs the operator unchanged
            on the local operands.
        padding: factor to the fill values of its operands' padding where it is split unevenly, for factors that
            `autoshard.rules.padding` cannot decide. A rewrite that tolerates padding says `{}`. A rewrite without this
            field is only split evenly.
        even: factors that may only be split evenly; `"*"` is all of them.
    """

    notation: str | tuple[Sequence[Dims], Sequence[Dims]]
    reduce: Mapping[str, str] | None = None
    linear: Sequence[Sequence[int]] = ()
    beside: Mapping[int, Beside] | None = None
    transparent: bool = False
    carries: Iterable[Carry] = ()
    added: Iterable[int] = ()
    whole: Mapping[str, Iterable[int]] | None = None
    exchanged: Mapping[str, int] | None = None
    together: Iterable[tuple[str, ...]] = ()
    blocked: Iterable[str] = ()
    sizes: Mapping[str, int] | None = None
    local: Rewrite | None = None
    padding: Mapping[str, Fill] | None = None
    even: Iterable[str] = ()

    def __str__(self) -> str:
        """The notation, with further properties in brackets."""
        notes = [f"{factor}: {reduction}" for factor, reduction in (self.reduce or {}).items()]
        if self.linear:
            notes.append("linear in " + ", ".join(f"({' '.join(map(str, group))})" for group in self.linear))
        if added := tuple(self.added):
            notes.append("added: " + " ".join(map(str, added)))
        notes += [f"{factor}: whole in {' '.join(map(str, results))}" for factor, results in (self.whole or {}).items()]
        notation = self.notation if isinstance(self.notation, str) else " -> ".join(map(render, self.notation))
        return f"{notation}  ({'; '.join(notes)})" if notes else notation


@dataclass(frozen=True, slots=True)
class BoundRule:
    """A rule with the sizes of one call, the form that strategies, lowering and verification read.

    `inputs` and `outputs` omit factors of size one, which cannot be split. `padding` gives, for each factor that may be
    split unevenly, the fill value of each operand's padding.
    """

    sizes: Mapping[str, int]
    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    reduce: Mapping[str, Reduction]
    linear: tuple[frozenset[int], ...]
    transparent: bool
    added: frozenset[int]
    whole: Mapping[str, frozenset[int]]
    blocked: frozenset[str]
    local: Rewrite | None
    padding: Mapping[str, tuple[Fill, ...]] = field(default_factory=dict)
    carries: tuple[Carry, ...] = ()
    exchanged: Mapping[str, int] = field(default_factory=dict)
    beside: Mapping[int, Beside] = field(default_factory=dict)
    together: tuple[tuple[str, ...], ...] = ()

    @property
    def communicates(self) -> bool:
        """Whether ranks communicate within the call's rewrite under some strategy."""
        return bool(self.whole or self.exchanged or self.together)

    @property
    def splittable(self) -> tuple[str, ...]:
        """The factors that an axis may split, in order of appearance."""
        return tuple(factor for factor in self.sizes if factor not in self.blocked)

    def may_communicate(self, factor: str) -> bool:
        """Whether the call's rewrite may communicate between the ranks that split `factor`."""
        return factor in self.whole or factor in self.exchanged

    def is_reduced(self, factor: str, output: int) -> bool:
        """Whether splitting `factor` leaves result `output` partial."""
        if _has(self.outputs[output], factor) or output in self.whole.get(factor, ()):
            return False
        return any(_has(dims, factor) for dims in self.inputs)


def bind(rule: Rule, inputs: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> BoundRule:
    """The rule with factor sizes found from the shapes of a call.

    Args:
        rule: the rule of the call's operator.
        inputs: shapes of the tensor operands, in order.
        outputs: shapes of the results, in order.

    Raises:
        InvalidSpecError: the notation does not fit the shapes, or a reduced factor has no reduction.
    """
    operands, results = parse(rule.notation) if isinstance(rule.notation, str) else rule.notation
    operands, results, anonymous = _name_anonymous(operands, results)
    sizes = _factor_sizes(rule, (*operands, *results), (*inputs, *outputs))
    live = {factor: size for factor, size in sizes.items() if size != 1}
    bound = BoundRule(
        sizes=live,
        inputs=tuple(_drop_absent(dims, live) for dims in operands),
        outputs=tuple(_drop_absent(dims, live) for dims in results),
        reduce={factor: Reduction(name) for factor, name in (rule.reduce or {}).items()},
        linear=tuple(frozenset(group) for group in rule.linear),
        transparent=rule.transparent,
        added=frozenset(rule.added),
        whole={factor: frozenset(results) for factor, results in (rule.whole or {}).items()},
        blocked=frozenset(rule.blocked) | anonymous,
        local=rule.local,
        carries=tuple(rule.carries),
        exchanged={factor: least for factor, least in (rule.exchanged or {}).items() if factor in live},
        beside=dict(rule.beside or {}),
        together=tuple(group for group in rule.together if all(factor in live for factor in group)),
    )
    _check_reductions(rule, bound)
    return bound


@lru_cache(maxsize=4096)
def parse(notation: str) -> tuple[tuple[Dims, ...], tuple[Dims, ...]]:
    """Operands and results of a notation string.

    Example:
        >>> parse("(a b) c -> a b 1")
        (((('a', 'b'), ('c',)),), ((('a',), ('b',), ()),))
    """
    sides = notation.split("->")
    if len(sides) != 2:
        raise InvalidSpecError(f"rule notation={notation!r} must have the form 'operands -> results'.")
    left, right = (tuple(_parse_operand(text) for text in side.split(",")) if side.strip() else () for side in sides)
    return left, right


def render(side: Sequence[Dims]) -> str:
    """Operands or results as notation: the inverse of `parse`.

    Example:
        >>> render(parse("(a b) c, scalar -> a b 1")[0])
        '(a b) c, scalar'
    """
    return ", ".join(" ".join(map(_render_dim, dims)) or "scalar" for dims in side)


def _render_dim(dim: tuple[str, ...]) -> str:
    if len(dim) == 1:
        return dim[0]
    return f"({' '.join(dim)})" if dim else "1"


def _parse_operand(text: str) -> Dims:
    if text.strip() == "scalar":
        return ()
    tokens = re.findall(r"\([^)]*\)|\S+", text)
    return tuple(_parse_dim(token) for token in tokens)


def _parse_dim(token: str) -> tuple[str, ...]:
    if token == "1":
        return ()
    return tuple(token.strip("()").split())


def _name_anonymous(
    operands: Sequence[Dims], results: Sequence[Dims]
) -> tuple[tuple[Dims, ...], tuple[Dims, ...], frozenset[str]]:
    names: list[str] = []

    def rename(factor: str) -> str:
        if factor != "_":
            return factor
        names.append(f"_{len(names)}")
        return names[-1]

    def walk(side: Sequence[Dims]) -> tuple[Dims, ...]:
        return tuple(tuple(tuple(rename(factor) for factor in dim) for dim in dims) for dims in side)

    return walk(operands), walk(results), frozenset(names)


def _factor_sizes(rule: Rule, all_dims: Sequence[Dims], shapes: Sequence[Sequence[int]]) -> dict[str, int]:
    if len(all_dims) != len(shapes):
        raise InvalidSpecError(f"rule {rule.notation!r} names {len(all_dims)} tensors, the call has {len(shapes)}.")
    known = dict(rule.sizes or {})
    pairs = [
        (dim, size) for dims, shape in zip(all_dims, shapes, strict=True) for dim, size in _zip_dims(rule, dims, shape)
    ]
    for dim, size in sorted(pairs, key=lambda pair: len(pair[0])):
        _solve_dim(rule, dim, size, known)
    order = list(dict.fromkeys(factor for dims in all_dims for dim in dims for factor in dim))
    return {factor: known[factor] for factor in order}


def _zip_dims(rule: Rule, dims: Dims, shape: Sequence[int]) -> Iterable[tuple[tuple[str, ...], int]]:
    if len(dims) != len(shape):
        raise InvalidSpecError(
            f"rule {rule.notation!r} names {len(dims)} dims where the call has shape={tuple(shape)}."
        )
    return zip(dims, shape, strict=True)


def _solve_dim(rule: Rule, dim: tuple[str, ...], size: int, known: dict[str, int]) -> None:
    unknown = [factor for factor in dim if factor not in known]
    product = math.prod(known[factor] for factor in dim if factor in known)
    if len(unknown) == 1 and product and size % product == 0:
        known[unknown[0]] = size // product
    elif unknown or product != size:
        raise InvalidSpecError(
            f"rule {rule.notation!r}: dim ({' '.join(dim)}) of size {size} does not fit the factors {known}."
        )


def _drop_absent(dims: Dims, live: Mapping[str, int]) -> Dims:
    return tuple(tuple(factor for factor in dim if factor in live) for dim in dims)


def _check_reductions(rule: Rule, bound: BoundRule) -> None:
    for factor in bound.splittable:
        for output in range(len(bound.outputs)):
            if bound.is_reduced(factor, output) and factor not in bound.reduce:
                raise InvalidSpecError(
                    f"rule {rule.notation!r}: factor {factor!r} vanishes from result {output}. Give its reduction "
                    f"(reduce={{{factor!r}: 'sum'}}) or block it (blocked=[{factor!r}])."
                )


def _has(dims: Dims, factor: str) -> bool:
    return any(factor in dim for dim in dims)
