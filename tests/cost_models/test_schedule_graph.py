"""tests cost_models/schedule_graph.py: an order that can run, and a steady state that repeats itself."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cost_models.errors import CostArgumentError
from cost_models.schedule_graph import put_in, schedule_graph, steady_window
from cost_models.schedule_orders import (
    SCHEDULES,
    last_forward_stage,
    rank_orders,
    repeating_micro_batches,
    settled_micro_batches,
    stage_ranks,
)

PERIODIC = tuple(name for name, item in SCHEDULES.items() if item.repeats)


@st.composite
def graphs(draw, schedules=(*SCHEDULES,), rounds=3):
    """(schedule, ranks, micro-batches, virtual stages) and whether transfers and pairs overlap."""
    schedule, ranks = draw(st.sampled_from(schedules)), draw(st.integers(1, 4))
    virtual = draw(st.sampled_from(SCHEDULES[schedule].numbers_of_stages(3)))
    micro_batches = ranks * draw(st.integers(2, rounds))
    if not schedule.startswith("Interleaved"):
        micro_batches += draw(st.integers(0, ranks - 1))
    options = {"overlap_sends": draw(st.booleans())}
    return (schedule, ranks, micro_batches, virtual), options


@given(graphs())
def test_every_node_stands_behind_what_it_waits_for(drawn):
    """But for the start, which waits for itself."""
    graph = schedule_graph(*drawn[0], **drawn[1])
    numbers = np.arange(1, len(graph.first))
    assert graph.first[0] == graph.second[0] == 0
    assert (graph.first[1:] < numbers).all()
    assert (graph.second[1:] < numbers).all()


@given(graphs())
def test_every_action_and_every_transfer_is_there_once(drawn):
    """Slots in the order of each rank; a transfer for each value that another rank needs."""
    (schedule, ranks, micro_batches, virtual), options = drawn
    graph = schedule_graph(*drawn[0], **options)
    orders = rank_orders(*drawn[0])
    for rank, order in enumerate(orders):
        mine = graph.slots[graph.slot_ranks == rank]
        assert len(mine) == sum(map(len, order))
        assert (np.diff(mine) > 0).all()
    owners = stage_ranks(schedule, ranks, virtual)
    crossings = sum(one != two for one, two in pairwise(owners))
    assert len(graph.sent) == 2 * micro_batches * crossings


@given(graphs(PERIODIC, rounds=9), st.integers(1, 3))
def test_more_micro_batches_are_more_periods(drawn, periods):
    """The graph of a longer step is that of a shorter one with periods put in, where its steady state ends."""
    (schedule, ranks, micro_batches, virtual), options = drawn
    step = repeating_micro_batches(schedule, ranks, micro_batches)
    assert step is not None
    fewer = micro_batches - periods * step
    assume(fewer >= (2 * ranks if schedule == "DualPipeV" else 1))
    graph = schedule_graph(schedule, ranks, fewer, virtual, **options)
    window = steady_window(graph, last_forward_stage(schedule, ranks, virtual), step)
    assume(window is not None)
    longer = put_in(graph, window, periods)
    expected = schedule_graph(schedule, ranks, micro_batches, virtual, **options)
    for name in ("first", "second", "kinds", "firsts", "lasts"):
        assert getattr(longer, name).tolist() == getattr(expected, name).tolist(), name
    assert _by_slot(longer) == _by_slot(expected)


def _by_slot(graph):
    """Rank, slot before, and transfers of each slot."""
    columns = (graph.slots, graph.slot_ranks, graph.begins, *graph.waits.T)
    return {slot: row for slot, *row in zip(*(column.tolist() for column in columns), strict=True)}


def test_no_periods_put_in_leave_a_graph_as_it_is():
    """A graph with all its micro-batches gets no further periods."""
    graph = schedule_graph("1F1B", 2, 12)
    window = steady_window(graph, 0, 1)
    assert window is not None
    assert put_in(graph, window, 0) is graph


@pytest.mark.parametrize("schedule", PERIODIC)
@pytest.mark.parametrize(("ranks", "virtual"), [(1, 1), (5, 2), (16, 2), (4, 3)])
def test_steady_states_are_found(schedule, ranks, virtual):
    """In as few micro-batches as are said to show them."""
    virtual = virtual if virtual in SCHEDULES[schedule].numbers_of_stages(9) else SCHEDULES[schedule].least_stages
    few = settled_micro_batches(schedule, ranks, 10 * ranks, virtual)
    step = repeating_micro_batches(schedule, ranks, 10 * ranks)
    assert step is not None
    last = last_forward_stage(schedule, ranks, virtual)
    assert steady_window(schedule_graph(schedule, ranks, few, virtual), last, step) is not None


def test_a_step_of_one_period_has_no_steady_state():
    """There is nothing to compare it with."""
    assert steady_window(schedule_graph("Interleaved1F1B", 4, 4, 2), 4, 4) is None


def test_graphs_that_are_kept_are_few():
    """Each may have some ten thousand nodes."""
    assert schedule_graph.cache_info().maxsize is not None


def test_what_a_schedule_does_not_admit_is_refused():
    """A schedule with wrong arguments is refused like in its simulation."""
    with pytest.raises(CostArgumentError, match="needs virtual_stages=1"):
        schedule_graph("1F1B", 2, 4, 2)
