"""A call with padding beside the same call without padding, and a table of functions by operator.

A function of the table takes a call and returns the `PaddedValue`s of its results. It raises `ReachedError` unless
clean parts of results (elements outside padding) equal the results without padding. Operators outside the table follow
their sharding rules (`by_rule`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from autoshard.ir.program import tensor_values
from passes.padding.contents import PaddedContent, content_of_call, is_softmax, may_divide_by_zero, stays_finite
from passes.padding.padded_values import Dim, PaddedValue, ReachedError, Region

_NO_GRADIENT = "may make infinities, or no numbers, of padding, and so may its gradient"

Results = tuple[PaddedValue | None, ...]
CallFunction = Callable[["PaddedCall"], Results]


@dataclass(frozen=True, slots=True)
class PaddedCall:
    """A call in the padded program, and the same call in the exact program, which has no padding.

    Args:
        node, exact: the call's node in the padded program and in the exact program.
        operands: the `PaddedValue`s of the call's tensor operands, in order.
        values: the `PaddedValue` of each earlier node of the padded program.
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
        """Return the padded call's argument at `position` or with `name`: a node or a constant."""
        return self.node.args[position] if len(self.node.args) > position else self.node.kwargs.get(name, default)

    def both(self, position: int, name: str, default: Any = None) -> tuple[Any, Any]:
        """Return a constant argument, by position or name, in the padded call and in the exact call."""
        (padded, exact) = (
            node.args[position] if len(node.args) > position else node.kwargs.get(name, default)
            for node in (self.node, self.exact)
        )
        return padded, exact

    def operand(self, position: int, name: str = "") -> PaddedValue:
        """Return the `PaddedValue` of the tensor argument at `position` or with `name`."""
        return self.values[self.argument(position, name)]

    def shapes(self, index: int) -> list[tuple[int, ...]]:
        """Return the shape of each result, in the padded program for `index` 0, in the exact program for `index` 1."""
        values = tensor_values((self.node, self.exact)[index])
        return [() if value is None else tuple(value.shape) for value in values]

    def plain_dims(self) -> tuple[Dim, ...]:
        """Return the dims of the first result, each as a single part with its padded and its exact size."""
        return tuple(((padded, exact),) for padded, exact in zip(self.shapes(0)[0], self.shapes(1)[0], strict=True))

    def check_weights(self, contents: Iterable[PaddedContent]) -> None:
        """Raise `ReachedError` if gradients flow through a softmax that may have NaN weights in padding.

        A row whose scores are all -inf has NaN weights, and these give NaN gradients. `contents` bounds the scores or
        weights in padding. Infinities that the clean part has too are allowed.
        """
        if (
            self.has_gradient
            and is_softmax(self.node)
            and not all(item.has_no_infinity_of_its_own for item in contents)
        ):
            raise ReachedError(_NO_GRADIENT)

    def content(self, operands: Sequence[PaddedContent], region: Region) -> PaddedContent:
        """Return the content of `region` of the first result: bounds of the numbers there.

        `operands` has the contents of the elements from which the region is computed.

        Raises:
            ReachedError: gradients in padding may be infinite or NaN. A later product with zero would not keep such a
                gradient from parameters, because zero times infinity is NaN. Also raised if the call may divide whole
                numbers in padding by zero, because torch raises an error then.
        """
        if region and may_divide_by_zero(self.node, operands):
            raise ReachedError("may divide whole numbers in padding by zero")
        if region and self.has_gradient and not stays_finite(self.node, operands):
            raise ReachedError(_NO_GRADIENT)
        return content_of_call(self.node, operands)


@dataclass(frozen=True, slots=True)
class _Entry:
    """The function that proves padded calls of one operator, as `padded_call` registers it.

    `sizes` has the arguments that may differ between the padded and the exact call, by position or name.
    """

    function: CallFunction
    sizes: frozenset[int | str]


_entries: dict[Any, _Entry] = {}


def padded_call(*operators: Any, sizes: Collection[int] = ()) -> Callable[[CallFunction], CallFunction]:
    """Return a decorator that enters a function into the table for each of `operators`.

    `sizes` has the positions of arguments, such as sizes and indices, that may differ between padded and exact call.
    """

    def register(function: CallFunction) -> CallFunction:
        for each in operators:
            assert each not in _entries, each
            _entries[each] = _Entry(function, frozenset(sizes))
        return function

    return register


def results_of(call: PaddedCall, by_rule: CallFunction) -> Results:
    """Return the `PaddedValue`s of a call's results, from the operator's function in the table.

    Operators outside the table are given to `by_rule`.

    Raises:
        ReachedError: padding may reach the clean part of a result (its elements outside padding).
    """
    entry = _entries.get(call.target)
    _check_arguments(call, frozenset() if entry is None else entry.sizes)
    results = by_rule(call) if entry is None else entry.function(call)
    _check_shapes(call, results)
    return results


def _check_arguments(call: PaddedCall, sizes: Collection[int | str]) -> None:
    """Raise `ReachedError` if a constant argument differs between the padded and the exact call.

    `sizes` has the positions or names of arguments that may differ."""
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
