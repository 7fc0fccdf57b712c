"""tests cost_models/units.py."""

from hypothesis import given
from hypothesis import strategies as st

from cost_models.units import bytes_from_gib, bytes_per_s_from_gbit, ceil_div


def test_memory_is_binary_and_links_are_decimal():
    """80 GiB and 400 Gbit/s."""
    assert bytes_from_gib(80) == 80 * 2**30
    assert bytes_per_s_from_gbit(400) == 50e9


@given(st.integers(0, 2**60), st.integers(1, 2**40))
def test_ceil_div_is_exact(numerator, denominator):
    """The smallest integer q with q * denominator >= numerator."""
    quotient = ceil_div(numerator, denominator)
    assert (quotient - 1) * denominator < numerator <= quotient * denominator
