"""Numbers of rows that depend on values, as symbols of a trace. `bounded` later replaces the symbols by upper bounds.

`nonzero`, `x[mask]` and `masked_select` have as many rows as a mask has ones. Python code that compares this number
gets the answer for the example, and PyTorch records the comparison.
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
    """Python code reads a value of a tensor, and the trace does not know the tensor's values."""


class UnboundedSizeError(Exception):
    """A size that depends on values cannot safely be replaced by its upper bound, because results might change."""


def new_environment() -> ShapeEnv:
    """Return a `ShapeEnv` of torch in which numbers of rows become symbols, and values that Python reads do not."""
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
"""Operator → function `f(nonzero, *args)` that computes the operator's result from masks' indices by `nonzero`."""


@dataclass(slots=True)
class SymbolicCounts:
    """The symbols of a trace that stand for numbers of rows.

    Args:
        environment: torch's environment that makes symbols.
        masks: symbol → the mask whose ones it counts.
        numbers: symbol → its value in the example, if known.
    """

    environment: ShapeEnv
    masks: dict[Any, Tensor] = field(default_factory=dict)
    numbers: dict[Any, int] = field(default_factory=dict)

    def add(self, mask: Tensor, places: Tensor, number: int | None) -> None:
        """Record the symbol that counts the ones of `mask`, from the shape of `places`, the indices of these ones.

        `number` is the count in the example, or None if unknown.
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
        """Return a traced bool tensor for each expression of symbols, by which a later call computes whether it holds.

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
        """Return the expressions, such as `u0 > 2`, that Python code or torch assumed about numbers of rows so far."""
        by_symbol = self.environment.deferred_runtime_asserts
        expressions = [item.expr for symbol in self.masks for item in by_symbol.get(symbol, ())]
        return [expression for expression in expressions if not self._always_holds(expression)]

    def _always_holds(self, expression: Any) -> bool:
        """Whether the expression holds for all nonnegative numbers of rows."""
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
