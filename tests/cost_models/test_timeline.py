"""The total time of a timeline."""

from hypothesis import given
from hypothesis import strategies as st

from cost_models.timeline import Span, Timeline

TIMES = st.integers(0, 100).map(lambda number: number / 8)


@given(st.lists(st.tuples(TIMES, TIMES)))
def test_the_step_ends_with_its_last_span(times):
    """A timeline takes until its last span ends, and no time without spans."""
    spans = tuple(Span("task", "compute", min(pair), max(pair)) for pair in times)
    assert Timeline(spans).total_s == max((max(pair) for pair in times), default=0.0)
