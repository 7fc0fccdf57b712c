"""Numbers of rows that depend on values, as symbols of a trace; `bounded` makes sizes of them afterwards.

`nonzero`, `x[mask]` and `masked_select` have as many rows as a mask has ones. torch gives the number a symbol without a
value, which all shapes carry, and notes what is asked of it: Python that compares it gets the value of the example.
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
"""`aten.nonzero`, of whose number of rows note is taken."""


class ValueUnavailableError(Exception):
    """A value is read from a tensor that depends on a tensor without values."""


class UnboundedSizeError(Exception):
    """A program does with a tensor of unknown size what is not known to be right with a bounded one."""


def new_environment() -> ShapeEnv:
    """What symbols of numbers of rows live in; a value that is read makes none."""
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
"""Operator to a function that makes the call by way of `nonzero`."""


@dataclass(slots=True)
class SymbolicCounts:
    """The symbols that a trace made for numbers of rows, each with the mask that it counts.

    Args:
        environment: torch's, in which symbols live.
    """

    environment: ShapeEnv
    masks: dict[Any, Tensor] = field(default_factory=dict)
    numbers: dict[Any, int] = field(default_factory=dict)

    def add(self, mask: Tensor, places: Tensor, number: int | None) -> None:
        """Note the places of a mask's ones, and how many there are in the example, if that is known."""
        size: Any = places.shape[0]
        symbol: Any = sympy.sympify(size) if isinstance(size, int) else size.node.expr
        if not symbol.is_Symbol:
            return  # the number of the same mask, which was noted before, and is known by now
        self.masks[symbol] = mask
        if number is not None:
            self.numbers[symbol] = number
            known = getattr(self.environment, "set_real_tensor_prop_unbacked_vals", None)
            known = known or self.environment.set_unbacked_var_to_val  # type: ignore[attr-defined]  (torch < 2.13)
            known(symbol, number)

    def computed(self, expressions: Sequence[Any]) -> list[Tensor]:
        """Whether each holds, as a traced tensor.

        Raises:
            ValueUnavailableError: it is not known whether they hold in the example.
            UnboundedSizeError: one does not.
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
        """What Python, or torch, took to be true of the numbers so far."""
        by_symbol = self.environment.deferred_runtime_asserts
        expressions = [item.expr for symbol in self.masks for item in by_symbol.get(symbol, ())]
        return [expression for expression in expressions if not self._always_holds(expression)]

    def _always_holds(self, expression: Any) -> bool:
        """Whether it says no more than that numbers of rows are not negative."""
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
    """An expression of symbols, computed from tensors."""
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
