"""Formulas of sizes: interpolation, ceilings, and functions for numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from cost_models.errors import CostArgumentError
from cost_models.formulas import ceil_div, grid, interpolate, published, size_symbol, value_at, vectorise

A, B = size_symbol("a"), size_symbol("b")
SIZES = st.integers(1, 10**6)


@given(st.lists(st.integers(-50, 50), min_size=6, max_size=6), SIZES, SIZES)
def test_interpolation_finds_the_polynomial(coefficients: list[int], a: int, b: int) -> None:
    """Interpolation finds a polynomial of degree one in the first symbol and two in the second."""

    def polynomial(x: int, y: int) -> int:
        return sum(c * x**i * y**j for c, (i, j) in zip(coefficients, grid([(0, 1), (0, 1, 2)]), strict=True))

    axes = [(4, 8), (16, 8, 12)]
    found = interpolate([A, B], axes, {point: polynomial(*point) for point in grid(axes)})
    assert value_at(found, {A: a, B: b}) == polynomial(a, b)


@given(SIZES, SIZES, SIZES)
def test_one_ceiling_is_as_good_as_two(size: int, a: int, b: int) -> None:
    """Two ceilings in sequence become one, with the same value for all numbers."""
    found = ceil_div(ceil_div(size_symbol("size"), A), B)
    assert value_at(found, {size_symbol("size"): size, A: a, B: b}) == ceil_div(ceil_div(size, a), b)
    assert len(sympy.sympify(found).atoms(sympy.ceiling)) == 1


def test_published_formulas_are_in_plain_symbols_and_fractions() -> None:
    """A published formula has plain symbols and fractions, and without ceilings for even sizes."""
    formula = published(2.5 * ceil_div(A, B) * A)
    assert formula == sympy.Rational(5, 2) * sympy.Symbol("a") * sympy.ceiling(sympy.Symbol("a") / sympy.Symbol("b"))
    assert published(ceil_div(A, B), even=True) == sympy.Symbol("a") / sympy.Symbol("b")


@given(st.lists(SIZES, min_size=1, max_size=5), st.integers(1, 512))
def test_vectorised_equals_substituted(sizes: list[int], pieces: int) -> None:
    """A vectorised formula with ceilings equals substitution at every size."""
    formula = published(3 * ceil_div(sympy.Rational(2, 3) * 3 * A, B) + A / B)
    found = vectorise(formula)(a=np.array(sizes), b=pieces)
    wanted = [3 * -(-2 * size // pieces) + size / pieces for size in sizes]
    np.testing.assert_allclose(found, wanted, rtol=1e-15)


def test_vectorised_broadcasts() -> None:
    """A function of a formula broadcasts arrays, and of a constant gives the constant."""
    formula = published(A * B)
    assert vectorise(formula)(a=[[1], [2]], b=[3, 4, 5]).shape == (2, 3)
    assert math.isclose(float(vectorise(sympy.Integer(7))()), 7.0)


def test_a_missing_symbol_is_named() -> None:
    """A missing or surplus symbol is refused by name."""
    with pytest.raises(CostArgumentError, match="one of a, b; given: a, layers"):
        vectorise(published(A * B))(a=1, layers=2)
