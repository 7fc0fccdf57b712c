"""tests cost_models/throughput.py."""

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
    """More bytes take at least as long, for any measurements."""
    curve = curve_of(points)
    low, high = sorted((left, right))
    assert time_on(curve, low) <= time_on(curve, high) * (1 + 1e-9)


@given(POINTS)
def test_a_curve_gives_back_what_it_is_made_of(points):
    """At each measured size, the curve gives the longest time that was measured up to this size."""
    longest = 0.0
    for size, seconds in sorted(points):
        longest = max(longest, seconds)
        assert time_on(curve_of(points), size) == pytest.approx(longest)


def test_numbers_of_a_file_read_back():
    """Names of operators have dots of their own."""
    curves = {"aten.tanh.default": ((1000.0, 3e9), (64000.0, 2e9)), "memory": ((10.0, 1e9),)}
    numbers = {path.removeprefix("throughput."): value for path, (value, _) in numbers_of(curves).items()}
    assert curves_of(numbers) == curves


@pytest.mark.parametrize("path", ["memory", "memory.many", "memory.0", "memory.-1", ".4096"])
def test_a_size_that_is_no_number_of_bytes_is_refused(path):
    """Each rate of a curve stands at a number of bytes above zero."""
    with pytest.raises(HardwareFileError, match=rf"mine\.toml: the table \[throughput\.{path}\] must read"):
        curves_of({path: 1e9}, "mine.toml")
