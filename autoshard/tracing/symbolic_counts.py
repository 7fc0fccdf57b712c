"""Numbers of rows that depend on values, as symbols of a trace. `bounded` later turns the symbols into sizes.

`nonzero`, `x[mask]` and `masked_select` have one row for each one in a mask. Python code that compares this number gets
the answer for the example, and PyTorch records the comparison.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv

aten = torch.ops.aten

Nonzero = Callable[[Tensor], Tensor]
"""Function that computes `aten.nonzero` of a mask, and records the number of rows as a symbol."""


class ValueUnavailableError(Exception):
    """A value is read from a tensor that has no known values."""


class UnboundedSizeError(Exception):
    """A program may be wrong if a size that depends on values is replaced by its upper bound."""


def new_environment() -> ShapeEnv:
    """Return torch's environment of symbols. Numbers of rows become symbols, values that are read do not."""
    return ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=True)


def _index(nonzero: Nonzero, x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    found: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            found += nonzero(index).unbind(1)
        else:
            found.append(index)
    return aten.index.Tensor(x, found)


def _masked_select(nonzero: Nonzero, x: Tensor, mask: Tensor) -> Tensor:
    x, mask = torch.broadcast_tensors(x, mask)
    return aten.index.Tensor(x, list(nonzero(mask).unbind(1)))


SYMBOLIC: Mapping[Any, Callable[..., Tensor]] = {
    aten.nonzero.default: lambda nonzero, x: nonzero(x),
    aten.index.Tensor: _index,
    aten.masked_select.default: _masked_select,
}
"""Operator → function `f(nonzero, *args)` that performs a call of the operator with `nonzero`."""


@dataclass(slots=True)
class SymbolicCounts:
    """The symbols of a trace for numbers of rows.

    `masks` has the mask whose ones a symbol counts, and `numbers` the symbol's value in the example, if known.
    """

    environment: ShapeEnv
    masks: dict[Any, Tensor] = field(default_factory=dict)
    numbers: dict[Any, int] = field(default_factory=dict)

    def add(self, mask: Tensor, places: Tensor, number: int | None) -> None:
        """Record the symbol for the number of rows of `places`, the indices of a mask's ones.

        `number` is the number of rows in the example, if known.
        """
        size: Any = places.shape[0]
        symbol: Any = sympy.sympify(size) if isinstance(size, int) else size.node.expr
        if not symbol.is_Symbol:
            return  # the number of a mask that was recorded before
        self.masks[symbol] = mask
        if number is not None:
            self.numbers[symbol] = number
            known = getattr(self.environment, "set_real_tensor_prop_unbacked_vals", None)
            known = known or self.environment.set_unbacked_var_to_val  # type: ignore[attr-defined]  (torch < 2.13)
            known(symbol, number)

    def computed(self, expressions: Sequence[Any]) -> list[Tensor]:
        """Return a traced bool tensor for each expression, which says in later calls whether the expression holds.

        Raises:
            ValueUnavailableError: the example does not decide whether an expression holds.
            UnboundedSizeError: an expression does not hold in the example.
        """
        for expression in expressions:
            holds = expression.subs(self.numbers)
            if holds is sympy.false:
                raise UnboundedSizeError(f"{expression} does not hold")
            if holds is not sympy.true:
                raise ValueUnavailableError(f"{expression} is not known")
        used = {symbol for expression in expressions for symbol in expression.free_symbols}
        counts = {symbol: torch.count_nonzero(mask) for symbol, mask in self.masks.items() if symbol in used}
        return [_compute(expression, counts) for expression in expressions]

    def assumed(self) -> list[Any]:
        """Return the expressions in numbers of rows that Python code or torch assumed to hold so far."""
        by_symbol = self.environment.deferred_runtime_asserts
        expressions = [item.expr for symbol in self.masks for item in by_symbol.get(symbol, ())]
        return [expression for expression in expressions if not self._always_holds(expression)]

    def _always_holds(self, expression: Any) -> bool:
        """Whether the expression follows from nonnegative numbers of rows."""
        sizes = {symbol: sympy.Dummy(integer=True, nonnegative=True) for symbol in expression.free_symbols}
        return expression.subs(sizes) is sympy.true


_COMPARISONS: Mapping[type, Callable[[Any, Any], Any]] = {
    sympy.Eq: operator.eq,
    sympy.Ne: operator.ne,
    sympy.Lt: operator.lt,
    sympy.Le: operator.le,
    sympy.Gt: operator.gt,
    sympy.Ge: operator.ge,
}


def _compute(expression: Any, counts: Mapping[Any, Tensor]) -> Any:
    if expression.is_Integer:
        return int(expression)
    if expression in counts:
        return counts[expression]
    parts = [_compute(part, counts) for part in expression.args]
    if isinstance(expression, sympy.Add):
        return functools.reduce(operator.add, parts)
    if isinstance(expression, sympy.Mul):
        return functools.reduce(operator.mul, parts)
    for kind, compare in _COMPARISONS.items():
        if isinstance(expression, kind):
            return compare(*parts)
    raise UnboundedSizeError(f"a branch depends on {expression}")
