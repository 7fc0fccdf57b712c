"""One call of both programs, and the table of padding functions by operator.

A function of the table takes a call and returns its results. Their clean parts must depend only on the clean parts of
the operands, by the same numbers as in the exact program. Otherwise it raises `ReachedError`. Operators outside the
table follow their sharding rules (`by_rule`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoshard.ir.program import tensor_values
from passes.padding.contents import PaddedContent, content_of_call, stays_finite, weighs
from passes.padding.padded_values import Dim, PaddedValue, ReachedError, Region

_NO_GRADIENT = "may make infinities, or no numbers, of padding, and so may its gradient"

Results = tuple[PaddedValue | None, ...]
CallFunction = Callable[["PaddedCall"], Results]


@dataclass(frozen=True, slots=True)
class PaddedCall:
    """A call of both programs.

    Args:
        node: the call in the padded program.
        exact: the call in the exact program.
        operands: its tensor operands, in order.
        values: the padded values of nodes.
        has_gradient: whether gradients of parameters, or of inputs, go through it.
    """

    node: fx.Node
    exact: fx.Node
    operands: tuple[PaddedValue, ...]
    values: Mapping[fx.Node, Any]
    has_gradient: bool = False

    @property
    def target(self) -> Any:
        """The operator."""
        return self.node.target

    @property
    def is_padded(self) -> bool:
        """Whether any operand is padded, or any result has another size in the exact program."""
        return any(value.is_padded for value in self.operands) or self.shapes(0) != self.shapes(1)

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """An argument of the padded call: a node, or a constant."""
        return self.node.args[position] if len(self.node.args) > position else self.node.kwargs.get(name, default)

    def both(self, position: int, name: str, default: Any = None) -> tuple[Any, Any]:
        """A constant argument in the padded call, and in the exact call."""
        (padded, exact) = (
            node.args[position] if len(node.args) > position else node.kwargs.get(name, default)
            for node in (self.node, self.exact)
        )
        return padded, exact

    def operand(self, position: int, name: str = "") -> PaddedValue:
        """The padded value of a tensor argument."""
        return self.values[self.argument(position, name)]

    def dtypes(self) -> list[torch.dtype]:
        """The types of the tensor operands."""
        found: list[torch.dtype] = []
        fx.map_arg((self.node.args, self.node.kwargs), lambda operand: found.append(operand.meta["val"].dtype))
        return found

    def shapes(self, index: int) -> list[tuple[int, ...]]:
        """The shapes of the results: 0 in the padded program, 1 in the exact one."""
        values = tensor_values((self.node, self.exact)[index])
        return [() if value is None else tuple(value.shape) for value in values]

    def plain_dims(self) -> tuple[Dim, ...]:
        """The dims of the first result, each of one part."""
        return tuple(((padded, exact),) for padded, exact in zip(self.shapes(0)[0], self.shapes(1)[0], strict=True))

    def check_weights(self, contents: Iterable[PaddedContent]) -> None:
        """Raise `ReachedError` if padding may give NaN weights, and so NaN gradients."""
        if self.has_gradient and weighs(self.node) and not all(item.has_no_infinity_of_its_own for item in contents):
            raise ReachedError(_NO_GRADIENT)

    def content(self, operands: Sequence[PaddedContent], region: Region) -> PaddedContent:
        """The content of a region of the result, from those of the operands there.

        Raises:
            ReachedError: gradients may be no numbers in padding. Such a gradient reaches parameters even where the
                result itself is left out, as zero times infinity is no number.
        """
        if region and self.has_gradient and not stays_finite(self.node, operands):
            raise ReachedError(_NO_GRADIENT)
        return content_of_call(self.node, operands)


@dataclass(frozen=True, slots=True)
class _Entry:
    """An operator's function, and the arguments that may differ with the length."""

    function: CallFunction
    sizes: frozenset[int | str]


_entries: dict[Any, _Entry] = {}


def padded_call(*operators: Any, sizes: Collection[int] = ()) -> Callable[[CallFunction], CallFunction]:
    """Register the function of operators.

    Args:
        operators: overloads.
        sizes: positions of size or place arguments, which may differ between the programs.
    """

    def register(function: CallFunction) -> CallFunction:
        for each in operators:
            assert each not in _entries, each
            _entries[each] = _Entry(function, frozenset(sizes))
        return function

    return register


def results_of(call: PaddedCall, by_rule: CallFunction) -> Results:
    """The results of a call of both programs.

    Args:
        call: the call.
        by_rule: function for operators outside the table.

    Raises:
        ReachedError: padding may reach their clean parts.
    """
    entry = _entries.get(call.target)
    _check_arguments(call, frozenset() if entry is None else entry.sizes)
    results = by_rule(call) if entry is None else entry.function(call)
    _check_shapes(call, results)
    return results


def _check_arguments(call: PaddedCall, sizes: Collection[int | str]) -> None:
    """The constants of both calls are equal, but for sizes that the operator's function looks at."""
    pairs = [*enumerate(zip(call.node.args, call.exact.args, strict=True))]
    named = [(name, (value, call.exact.kwargs[name])) for name, value in call.node.kwargs.items()]
    for place, (padded, exact) in [*pairs, *named]:
        if place in sizes:
            continue
        for one, other in zip(pytree.tree_leaves(padded), pytree.tree_leaves(exact), strict=True):
            if not isinstance(one, fx.Node) and not _is_same(one, other):
                raise ReachedError("computes with a number that depends on the length")


def _is_same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (one == other or (one != one and other != other))


def _check_shapes(call: PaddedCall, results: Results) -> None:
    for index in (0, 1):
        found = [() if value is None else value.shape(index) for value in results]
        if found != call.shapes(index):
            raise ReachedError("makes another size of the length")
