"""tests cost_models/allocator.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.allocator import AllocatorPeak, allocator_rules, replay
from cost_models.errors import CostArgumentError
from cost_models.units import MIB

SIZES = st.one_of(st.integers(0, 4096), st.integers(0, 3 * MIB), st.integers(0, 40 * MIB))
EVENTS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 30), SIZES).map(lambda e: (min(e[:2]), max(e[:2]), e[2])), max_size=40
)
RULES = allocator_rules()


def by_hand(events) -> AllocatorPeak:
    """The same allocator over plain lists: each segment a list of [size, holder], scanned for the best fit."""
    segments: list[tuple[bool, list[list]]] = []
    requested = allocated = top_requested = top_allocated = 0
    steps = [(birth, 1, i, size) for i, (birth, death, size) in enumerate(events) if size and death > birth]
    steps += [(death, 0, i, size) for i, (birth, death, size) in enumerate(events) if size and death > birth]
    for _, is_birth, index, size in sorted(steps):
        if is_birth:
            block = -(-size // 512) * 512
            small = block <= MIB
            fits = [
                (entry[0], which, place)
                for which, (is_small, blocks) in enumerate(segments)
                for place, entry in enumerate(blocks)
                if is_small == small and entry[1] is None and entry[0] >= block
            ]
            if fits:
                found, which, place = min(fits)
            else:
                found = 2 * MIB if small else 20 * MIB if block < 10 * MIB else -(-block // (2 * MIB)) * 2 * MIB
                which, place = len(segments), 0
                segments.append((small, [[found, None]]))
            blocks, rest = segments[which][1], found - block
            if rest >= 512 if small else rest > MIB:
                blocks[place : place + 1] = [[block, index], [rest, None]]
            else:
                blocks[place][1] = index
            requested, allocated = requested + size, allocated + blocks[place][0]
        else:
            blocks = next(blocks for _, blocks in segments if any(entry[1] == index for entry in blocks))
            place = next(i for i, entry in enumerate(blocks) if entry[1] == index)
            requested, allocated = requested - size, allocated - blocks[place][0]
            blocks[place][1] = None
            joined: list[list] = []
            for entry in blocks:
                if joined and joined[-1][1] is None and entry[1] is None:
                    joined[-1][0] += entry[0]
                else:
                    joined.append(entry)
            blocks[:] = joined
        top_requested, top_allocated = max(top_requested, requested), max(top_allocated, allocated)
    return AllocatorPeak(top_requested, top_allocated, sum(entry[0] for _, blocks in segments for entry in blocks))


@given(EVENTS)
def test_replay_equals_scanning_every_block(events):
    """Rounding, best fit, splitting and joining, against plain lists."""
    assert replay(events) == by_hand(events)


@given(EVENTS)
def test_reserved_holds_allocated_holds_requested(events):
    """In whole segments."""
    peak = replay(events)
    assert peak.requested <= peak.allocated <= peak.reserved
    assert peak.reserved % (2 * MIB) == 0


def test_values_that_follow_each_other_share_a_segment():
    """Ten of 30 MiB, one at a time."""
    assert replay([(t, t + 1, 30 * MIB) for t in range(10)]).reserved == 30 * MIB


def test_a_hole_that_is_too_small_is_not_used():
    """Two of 12 MiB around one of 40 MiB: freed, they do not hold 24 MiB."""
    peak = replay([(0, 1, 12 * MIB), (0, 1, 12 * MIB), (1, 2, 24 * MIB)])
    assert (peak.allocated, peak.reserved) == (24 * MIB, 48 * MIB)


def test_a_large_block_with_little_left_is_not_split():
    """19.5 MiB of a free 20 MiB segment count whole: at most 1 MiB would be left."""
    events = [(0, 1, 5 * MIB), (1, 2, 19 * MIB + MIB // 2)]
    assert replay(events).allocated == 20 * MIB
    assert RULES.is_split(5 * MIB, 15 * MIB)
    assert not RULES.is_split(19 * MIB, MIB)


def test_bad_events_are_refused():
    """Negative sizes, and deaths before births."""
    with pytest.raises(CostArgumentError, match="negative"):
        replay([(0, 1, -1)])
    with pytest.raises(CostArgumentError, match="dies before"):
        replay([(2, 1, 1)])
