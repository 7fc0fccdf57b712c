"""Division rounded up."""

from hypothesis import given
from hypothesis import strategies as st

from cost_models.units import ceil_div


@given(st.integers(0, 2**60), st.integers(1, 2**40))
def test_ceil_div_is_exact(numerator, denominator):
    """The result is the smallest integer q with q * denominator >= numerator."""
    quotient = ceil_div(numerator, denominator)
    assert (quotient - 1) * denominator < numerator <= quotient * denominator
