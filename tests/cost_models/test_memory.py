"""tests cost_models/memory.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.errors import CostArgumentError
from cost_models.memory import optimizer_state_bytes, peak, round_block, round_segment, usage
from cost_models.units import MIB

EVENTS = st.lists(
    st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(0, 1000)).map(
        lambda e: (min(e[:2]), max(e[:2]), e[2])
    )
)


@given(st.integers(0, 2**40))
def test_blocks_and_segments_round_up(size):
    """A block is the next multiple of 512 B, a segment holds it in multiples of 2 MiB."""
    block = round_block(size)
    assert size <= block < size + 512
    assert block % 512 == 0
    assert round_segment(block) >= block
    assert round_segment(block) % (2 * MIB) == 0


@pytest.mark.parametrize(
    ("block", "segment"), [(0, 0), (512, 2), (MIB, 2), (MIB + 512, 20), (10 * MIB, 10), (11 * MIB, 12)]
)
def test_segments_follow_the_allocator(block, segment):
    """2 MiB for small blocks, 20 MiB up to 10 MiB, then multiples of 2 MiB."""
    assert round_segment(block) == segment * MIB


@given(EVENTS)
def test_peak_equals_counting_every_step(events):
    """Against a direct count at each time."""
    counted = [sum(size for birth, death, size in events if birth <= time < death) for time in range(21)]
    assert peak(events) == max(counted)
    assert sum(size for _, _, size in events) >= peak(events)


@given(EVENTS, EVENTS)
def test_more_values_never_lower_the_peak(events, more):
    """Monotone in the set of values."""
    assert peak(events) <= peak(events + more)


@given(EVENTS)
def test_everything_is_freed_at_the_end(events):
    """The last point of the usage is zero."""
    points = usage(events)
    assert not points or points[-1][1] == 0


@pytest.mark.parametrize(("optimizer", "size"), [("sgd", 0), ("sgd_momentum", 400), ("adam", 804), ("adamw", 804)])
def test_optimizer_state(optimizer, size):
    """100 float32 elements; Adam's step is one more scalar."""
    assert optimizer_state_bytes(100, optimizer, 4) == size
    assert optimizer_state_bytes(100, optimizer, 4, master_weights=True) == size + 400


def test_unknown_optimizer_raises():
    """The known ones are named."""
    with pytest.raises(CostArgumentError, match=r"'lion'.*adamw"):
        optimizer_state_bytes(1, "lion", 4)


def test_impossible_lifetimes_raise():
    """A value does not die before it is born; sizes are not negative."""
    with pytest.raises(CostArgumentError, match="dies before"):
        peak([(2, 1, 5)])
    with pytest.raises(CostArgumentError, match="negative"):
        round_block(-1)
