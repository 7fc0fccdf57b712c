"""Curves of throughput over size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.errors import HardwareFileError
from cost_models.throughput import curve_of, curves_of, numbers_of, time_on

POINTS = st.lists(
    st.tuples(st.floats(1e3, 1e9), st.floats(1e-7, 1.0)),
    min_size=1,
    max_size=6,
    unique_by=lambda point: round(point[0]),
)


@given(POINTS, st.floats(1, 1e11), st.floats(1, 1e11))
def test_more_bytes_take_no_less_time(points, left, right):
    """On any curve, more bytes take at least as long."""
    curve = curve_of(points)
    low, high = sorted((left, right))
    assert time_on(curve, low) <= time_on(curve, high) * (1 + 1e-9)


@given(POINTS)
def test_a_curve_gives_back_what_it_is_made_of(points):
    """A curve gives, at each measured size, the longest time measured up to this size."""
    longest = 0.0
    for size, seconds in sorted(points):
        longest = max(longest, seconds)
        assert time_on(curve_of(points), size) == pytest.approx(longest)


def test_numbers_of_a_file_read_back():
    """Curves written as numbers of a file are read back equal, although names of operators have dots."""
    curves = {"aten.tanh.default": ((1000.0, 3e9), (64000.0, 2e9)), "memory": ((10.0, 1e9),)}
    numbers = {path.removeprefix("throughput."): value for path, (value, _) in numbers_of(curves).items()}
    assert curves_of(numbers) == curves


@pytest.mark.parametrize("path", ["memory", "memory.many", "memory.0", "memory.-1", ".4096"])
def test_a_size_that_is_no_number_of_bytes_is_refused(path):
    """A size that is no positive whole number is refused with its table."""
    with pytest.raises(HardwareFileError, match=rf"mine\.toml: the table \[throughput\.{path}\] must read"):
        curves_of({path: 1e9}, "mine.toml")
