"""The factor notation of sharding rules, which says how the indices of an operator's results depend on its operands.

Each dim of each operand and result is a product of *factors*, written major to minor. `"m k, k n -> m n"` is a matrix
product. `"(a b) c -> a b c"` is a view that splits a dim. `1` is a dim of size one without a factor. `_` is a dim that
cannot be split.

Ranks may split a call along a factor, and then hold a piece of each dim that has the factor. If an operand has the
factor and a result lacks it, the result is *reduced* over the factor. It is then partial, and the rule must give the
reduction (`reduce={"k": "sum"}`), or block the factor.

A *partial* value has a *pending reduction*: each rank holds an addend, and the sum over the ranks is the value. The
reduction may also be a maximum, minimum or product. `Rule.linear` and `Rule.transparent` say which partial sums give
partial sums as results. All other partial operands are reduced before the call.

All strategies of a call follow from its rule (`autoshard.rules.strategies`). The idea of factors follows Shardy's
sharding rules (OpenXLA, 2024) and JAX's `custom_partitioning` rule strings. Linearity, rewrites and blocked dims are
additions of autoshard.
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
"""A value to write into an operand's padding before a call.

It is a number, or a reduction, which stands for its identity element. None leaves the padding unchanged.
"""

Dims = tuple[tuple[str, ...], ...]
"""The factors of each dim of an operand or result, major to minor. `()` is a dim of size one without a factor."""

Rewrite = Callable[..., Any]
"""`rewrite(context, *args, **kwargs)` emits the calls that each rank runs in place of a call (`autoshard.rules.local`).

The arguments are the call's arguments with local values. The result stands for the call's result.
"""


class OperandCondition(StrEnum):
    """Condition on one operand of a call under which another operand may be a partial sum.

    If the condition fails, addends could become infinite, and their sum NaN, where one device has a number
    (`autoshard.rules.linearity`).
    """

    FINITE = "finite"
    """This operand must be finite, because it multiplies the partial sum. The default of all operands."""

    NOT_ZERO = "not zero"
    """This operand must not be zero, because it divides the partial sum."""

    ANYTHING = "anything"
    """This operand may have any value. The multiplier of the partial sum is bounded, or independent of this operand."""

    NEVER = "never"
    """No partial sum may pass: finite values of this operand, such as a singular matrix, may give infinite results."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The ways in which an operator call may be split over ranks. A function under `sharding_rule` returns a rule.

    A factor is a named index of the operator, such as `m` in the matrix product `"m k, k n -> m n"`. Ranks that split a
    factor each hold a piece of every dim that has the factor. A result is partial if each rank holds one term of its
    reduction. All fields but `notation` are optional. An example is in docs/how_to/custom_operator.md.

    Args:
        notation: the factors of each dim of the operands, then of the results. `(a b)` is a dim of two factors in
            row-major order, `1` a dim of size one, and `_` a dim that stays whole. `scalar` is a tensor without dims.
            The operands are the tensors among the call's arguments, in order. Tensors in lists count too, and absent
            ones are left out. A pair of sequences of `autoshard.rules.notation.Dims` may replace the text.
        reduce: from a factor that a result lacks to its reduction: "sum", "max", "min" or "product".
        linear: sets of positions of operands. All results are jointly linear in the operands of a set. If exactly these
            operands are partial sums, the results are partial sums. A sum has `[(0, 1)]`, and a product has
            `[(0,), (1,)]`. `[()]` means that the results are zero. Sets with a boolean operand are left out.
        beside: from the position of an operand to a condition on its values, under which other operands may be partial
            sums. The condition is "finite" (default), "not zero" (a divisor), "anything" or "never".
        transparent: True if the operator only moves elements of operand 0. Partial sums then pass, beside any values of
            other operands.
        added: positions of operands that are added to a sum over a factor, such as the bias of `addmm`. If the factor
            is split, these operands must be partial sums. Otherwise each rank would add them.
        whole: from a factor to positions of results that lack the factor and stay whole when it is split. Either these
            results do not depend on the factor, or `local` reduces over it (`context.all_reduce`).
        exchanged: from a factor along which `local` communicates, though no result lacks it, to the least number of
            elements in a rank's piece. Examples are a softmax over a split dim, and a halo exchange.
        together: groups of factors that one axis may split at the same time, such as tokens and experts. The factors of
            a group share no operand dim. `local` communicates along the axis (`context.group`), so no result is
            partial.
        blocked: factors that cannot be split, except within a group of `together`.
        sizes: from a factor to its size. A dim of several factors needs the sizes of all but one of them. A size is
            also known if another dim is this factor alone.
        local: a function `local(context, *args, **kwargs)` that emits each rank's calls if a factor is split. The
            arguments have local values. None: each rank runs the operator unchanged on local operands.
        padding: from a factor to the value that fills the padding of uneven splits, in all operands with the factor.
            `autoshard.rules.padding` decides for all other factors. With `local`, None allows even splits only, and
            `{}` means that padding may have any value.
        even: factors that may only be split evenly. `"*"` stands for all factors.
    """

    notation: str | tuple[Sequence[Dims], Sequence[Dims]]
    reduce: Mapping[str, str] | None = None
    linear: Sequence[Sequence[int]] = ()
    beside: Mapping[int, OperandCondition] | None = None
    transparent: bool = False
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
        """Return the notation, with reductions, linearity and other properties in brackets."""
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
    """A rule with the factor sizes of one call. Strategies, lowering and verification read this form.

    The fields have the meaning that they have in `Rule`, with two differences. `inputs` and `outputs` omit factors of
    size one, which cannot be split. `padding` maps each factor that may be split unevenly to the fill value of each
    operand's padding.
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
    exchanged: Mapping[str, int] = field(default_factory=dict)
    beside: Mapping[int, OperandCondition] = field(default_factory=dict)
    together: tuple[tuple[str, ...], ...] = ()

    @property
    def communicates(self) -> bool:
        """Whether the call's rewrite communicates between ranks under some strategy."""
        return bool(self.whole or self.exchanged or self.together)

    @property
    def splittable(self) -> tuple[str, ...]:
        """The factors that one mesh axis may split alone, in order of appearance."""
        return tuple(factor for factor in self.sizes if factor not in self.blocked)

    def may_communicate(self, factor: str) -> bool:
        """Whether the call's rewrite may communicate between the ranks that split `factor` alone."""
        return factor in self.whole or factor in self.exchanged

    def is_reduced(self, factor: str, output: int) -> bool:
        """Whether result `output` is partial over the axes that split `factor`."""
        if _has(self.outputs[output], factor) or output in self.whole.get(factor, ()):
            return False
        return any(_has(dims, factor) for dims in self.inputs)


def bind(rule: Rule, inputs: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> BoundRule:
    """Return `rule` with the sizes of its factors, from the shapes of a call's tensor operands and results.

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
        exchanged={factor: least for factor, least in (rule.exchanged or {}).items() if factor in live},
        beside=dict(rule.beside or {}),
        together=tuple(group for group in rule.together if all(factor in live for factor in group)),
    )
    _check_reductions(rule, bound)
    return bound


@lru_cache(maxsize=4096)
def parse(notation: str) -> tuple[tuple[Dims, ...], tuple[Dims, ...]]:
    """Return the dims of the operands and the dims of the results of a notation string.

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
    """Return the notation of operands or of results, given their dims, as the inverse of `parse`.

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
