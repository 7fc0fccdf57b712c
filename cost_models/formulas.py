"""Tools for costs as sympy expressions: symbols for sizes, exact interpolation, and numpy functions for sweeps.

While a formula is made, its symbols are positive integers, so that sympy simplifies ceilings. A formula for users
(`published`) has plain symbols, so that `sympy.Symbol("batch")` equals the formula's symbol.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np
import sympy
from numpy.typing import ArrayLike, NDArray

from cost_models.errors import CostArgumentError

Size = int | sympy.Expr
Point = tuple[int, ...]


def size_symbol(name: str) -> sympy.Symbol:
    """Return the symbol that stands for a size while a formula is made: a positive integer."""
    return sympy.Symbol(name, integer=True, positive=True)


def ceil_div(size: Size, pieces: Size) -> Size:
    """Return the size of the largest of `pieces` pieces. In an expression, nested ceilings become a single ceiling.

    Example:
        >>> ceil_div(ceil_div(7, 2), 2), ceil_div(ceil_div(7, size_symbol("a")), size_symbol("b"))
        (2, ceiling(7/(a*b)))
    """
    if isinstance(size, int) and isinstance(pieces, int):
        return -(-size // pieces)
    if isinstance(size, sympy.ceiling):  # ceil(ceil(x / a) / b) = ceil(x / (a b)) for positive whole a and b
        size = size.args[0]
    return sympy.ceiling(size / pieces)


def grid(axes: Sequence[Sequence[Any]]) -> list[Any]:
    """Return all points of a grid, in row-major order. `axes` has the values along each axis."""
    return list(product(*axes))


def interpolate(symbols: Sequence[sympy.Symbol], axes: Sequence[Sequence[Any]], values: Mapping[Any, Size]) -> Size:
    """Return the exact polynomial through `values` on a grid, in Lagrange's form over the rationals.

    Its degree in a symbol is at most the number of points along the symbol's axis, less one.

    Args:
        symbols: the symbol of each axis of the grid.
        axes: the distinct sizes along each axis, whole or rational.
        values: point of the grid to the polynomial's value there.

    Example:
        >>> n = size_symbol("n")
        >>> interpolate([n], [(1, 2, 3)], {(1,): 2, (2,): 5, (3,): 10})
        n**2 + 1
    """
    if len({values[point] for point in grid(axes)}) == 1:
        return values[grid(axes)[0]]
    if not symbols:
        return values[()]
    total = sympy.Integer(0)
    for size in axes[0]:
        rest = {point[1:]: value for point, value in values.items() if point[0] == size}
        others = [other for other in axes[0] if other != size]
        basis = prod([(symbols[0] - other) / sympy.sympify(size - other) for other in others])
        total += basis * interpolate(symbols[1:], axes[1:], rest)
    return sympy.expand(total)


def value_at(size: Size, sizes: Mapping[sympy.Symbol, int]) -> sympy.Expr:
    """Return the value of an expression of `size_symbol`s if its symbols have these sizes."""
    bare: Any = sympy.sympify(size)
    return bare.subs(dict(sizes))


def published(formula: Size, *, even: bool = False) -> sympy.Expr:
    """Return a formula of `size_symbol`s for users: expanded, with exact fractions and plain symbols.

    With `even`, ceilings are left out. The formula then holds only if all splits are even.
    """
    exact: Any = sympy.nsimplify(sympy.sympify(formula), rational=True)
    if even:
        exact = exact.replace(sympy.ceiling, lambda inner: inner)
    plain = {symbol: sympy.Symbol(symbol.name) for symbol in exact.free_symbols if isinstance(symbol, sympy.Symbol)}
    return sympy.expand(exact).xreplace(plain)


def vectorise(formula: sympy.Expr) -> Callable[..., NDArray[np.float64]]:
    """Turn a sympy formula, such as a result of `Plan.formula`, into a numpy function for many sizes at once.

    Returns:
        A function with one keyword argument for each symbol: numbers, or arrays that broadcast to each other. Its
        result is float64, exact up to 2**53 and rounded beyond that. Ceilings are exact.

    Raises:
        cost_models.errors.CostArgumentError: `formula` is not a sympy expression. Later, a call misses symbols, or has
            symbols that the formula lacks. The class is a `ValueError`, but not an `AutoshardError`.

    Example:
        >>> batch, data = sympy.symbols("batch data")
        >>> vectorise(64 * sympy.ceiling(batch / data))(batch=[8, 9], data=4)
        array([128., 192.])
    """
    if not isinstance(formula, sympy.Expr):
        raise CostArgumentError(f"formula={formula!r} is a {type(formula).__name__}; pass a result of Plan.formula.")
    symbols = sorted((symbol for symbol in formula.free_symbols if isinstance(symbol, sympy.Symbol)), key=str)
    names = [symbol.name for symbol in symbols]
    dummies = [sympy.Dummy() for _ in symbols]  # any name is good for a mesh axis, not for an argument in source text
    bare = formula.subs(dict(zip(symbols, dummies, strict=True)))
    whole = sympy.Function("ceil_of_quotient")
    divided: Any = bare.replace(sympy.ceiling, lambda inner: whole(*sympy.fraction(sympy.together(inner))))
    tables = [{"ceil_of_quotient": lambda above, below: np.ceil(above / below)}, "numpy"]
    function = sympy.lambdify(dummies, divided, modules=tables)

    def evaluate(**sizes: ArrayLike) -> NDArray[np.float64]:
        if set(sizes) != set(names):
            raise CostArgumentError(
                f"The formula is one of {', '.join(names) or 'nothing'}; given: {', '.join(sizes)}."
            )
        given = np.broadcast_arrays(*(np.asarray(sizes[name], dtype=np.float64) for name in names))
        shape = given[0].shape if given else ()
        return np.broadcast_to(np.asarray(function(*given), dtype=np.float64), shape)

    return evaluate
