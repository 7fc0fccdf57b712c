"""A call with padding beside the same call without padding, and a table of functions by operator.

A function of the table returns the padded values of a call's results. The function checks that clean parts of results
depend only on clean parts of operands, with equal numbers in both programs. Otherwise it raises `ReachedError`.
Operators outside the table follow their sharding rules (`by_rule`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from autoshard.ir.program import tensor_values
from passes.padding.contents import PaddedContent, content_of_call, is_softmax, stays_finite
from passes.padding.padded_values import Dim, PaddedValue, ReachedError, Region

_NO_GRADIENT = "may make infinities, or no numbers, of padding, and so may its gradient"

Results = tuple[PaddedValue | None, ...]
CallFunction = Callable[["PaddedCall"], Results]


@dataclass(frozen=True, slots=True)
class PaddedCall:
    """A call in the program with padding (the padded program), and the same call in the exact program, without padding.

    Args:
        operands: the padded values of the call's tensor operands, in order.
        values: the padded value of each node before the call.
        has_gradient: whether gradients of parameters, or of inputs, flow through the call.
    """

    node: fx.Node
    exact: fx.Node
    operands: tuple[PaddedValue, ...]
    values: Mapping[fx.Node, Any]
    has_gradient: bool = False

    @property
    def target(self) -> Any:
        """The operator that both calls run."""
        return self.node.target

    @property
    def is_padded(self) -> bool:
        """Whether any operand is padded, or any result has another size in the exact program."""
        return any(value.is_padded for value in self.operands) or self.shapes(0) != self.shapes(1)

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """Return an argument of the padded call, a node or a constant, by its position or its name."""
        return self.node.args[position] if len(self.node.args) > position else self.node.kwargs.get(name, default)

    def both(self, position: int, name: str, default: Any = None) -> tuple[Any, Any]:
        """Return a constant argument of the padded call and of the exact call, by its position or its name."""
        (padded, exact) = (
            node.args[position] if len(node.args) > position else node.kwargs.get(name, default)
            for node in (self.node, self.exact)
        )
        return padded, exact

    def operand(self, position: int, name: str = "") -> PaddedValue:
        """Return the padded value of a tensor argument, by its position or its name."""
        return self.values[self.argument(position, name)]

    def shapes(self, index: int) -> list[tuple[int, ...]]:
        """Return the shapes of the results, in the padded program for index 0, in the exact program for index 1."""
        values = tensor_values((self.node, self.exact)[index])
        return [() if value is None else tuple(value.shape) for value in values]

    def plain_dims(self) -> tuple[Dim, ...]:
        """Return the dims of the first result, each with one part: its padded and its exact size."""
        return tuple(((padded, exact),) for padded, exact in zip(self.shapes(0)[0], self.shapes(1)[0], strict=True))

    def check_weights(self, contents: Iterable[PaddedContent]) -> None:
        """Raise `ReachedError` if a softmax may have NaN weights in padding, because these give NaN gradients."""
        if (
            self.has_gradient
            and is_softmax(self.node)
            and not all(item.has_no_infinity_of_its_own for item in contents)
        ):
            raise ReachedError(_NO_GRADIENT)

    def content(self, operands: Sequence[PaddedContent], region: Region) -> PaddedContent:
        """Return the content of a region of the first result, given the contents of the operands there.

        Raises:
            ReachedError: gradients may be infinite or NaN in padding. Zero times infinity is NaN, so a later zero would
                not
                keep such a gradient from parameters.
        """
        if region and self.has_gradient and not stays_finite(self.node, operands):
            raise ReachedError(_NO_GRADIENT)
        return content_of_call(self.node, operands)


@dataclass(frozen=True, slots=True)
class _Entry:
    """`sizes`: positions or names of arguments that may differ between padded and exact call."""

    function: CallFunction
    sizes: frozenset[int | str]


_entries: dict[Any, _Entry] = {}


def padded_call(*operators: Any, sizes: Collection[int] = ()) -> Callable[[CallFunction], CallFunction]:
    """Return a decorator that registers a function for operators.

    `sizes` has positions of arguments that are sizes or indices, which may differ between padded and exact call.
    """

    def register(function: CallFunction) -> CallFunction:
        for each in operators:
            assert each not in _entries, each
            _entries[each] = _Entry(function, frozenset(sizes))
        return function

    return register


def results_of(call: PaddedCall, by_rule: CallFunction) -> Results:
    """Return the padded values of a call's results, by the table or else by `by_rule`.

    Raises:
        ReachedError: padding may reach the clean part of a result.
    """
    entry = _entries.get(call.target)
    _check_arguments(call, frozenset() if entry is None else entry.sizes)
    results = by_rule(call) if entry is None else entry.function(call)
    _check_shapes(call, results)
    return results


def _check_arguments(call: PaddedCall, sizes: Collection[int | str]) -> None:
    """Both calls must have equal constant arguments, except those in `sizes`, which the operator's function checks."""
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
