"""Times of pipeline schedules, compared with longest paths and published formulas."""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations

import networkx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.order_times import StageTimes, Transfer, neighbours, order_times, schedule_time
from cost_models.schedule_orders import SCHEDULES, ActionKind, admits, order_rows, rank_orders, stage_ranks

F, B, I, W = ActionKind  # noqa: E741  the letters of the literature
EIGHTHS = st.integers(0, 16).map(lambda number: number / 8)
SECONDS = st.one_of(EIGHTHS, st.floats(0, 2))
NAMES = StageTimes._fields


@st.composite
def stage_times(draw):
    """Random times of a stage."""
    return StageTimes(**{name: draw(SECONDS) for name in NAMES})


@st.composite
def pipelines(draw):
    """A schedule, its stages (all alike, alike but for the ends, or all different), micro-batches and
    virtual stages."""
    schedule, ranks = draw(st.sampled_from([*SCHEDULES])), draw(st.integers(1, 4))
    virtual = draw(st.sampled_from(SCHEDULES[schedule].numbers_of_stages(3)))
    rounds = draw(st.integers(2, 24))
    micro_batches = rounds * (ranks + draw(st.integers(0, max(0, (ranks - 1) // rounds))))
    if not SCHEDULES[schedule].in_rounds:
        micro_batches += draw(st.integers(0, 3))
    count = ranks * virtual
    alike = draw(st.sampled_from(["all", "middle", "none"]))
    stages = [draw(stage_times())] * count
    if alike == "none":
        stages = [draw(stage_times()) for _ in range(count)]
    elif alike == "middle":
        stages = [draw(stage_times()), *stages[1:-1], draw(stage_times())][-count:]
    return schedule, stages, micro_batches, virtual


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_steady_state_is_run_once(schedule):
    """The time of eighty micro-batches, computed from a repeated steady state, is within 0.5 % of the time of the
    whole order."""
    virtual = SCHEDULES[schedule].numbers_of_stages(2)[-1]
    stages = [StageTimes(1.0, 1.25, 0.75, 0.1)] * (4 * virtual)
    stages[0], stages[-1] = stages[0]._replace(forward_s=1.05), stages[0]._replace(forward_s=1.5)
    sent = dict.fromkeys(neighbours(4 * virtual), 0.1)
    actions_s, none = np.array([stage.actions_s for stage in stages]), np.zeros(4 * virtual)
    orders, owners = order_rows(schedule, 4, 80, virtual), stage_ranks(schedule, 4, virtual)
    whole, _ = order_times(orders, owners, actions_s, sent, once_s=none, update_s=none)
    found = schedule_time(schedule, tuple(stages), 80, virtual, overlap_sends=True)
    assert found == pytest.approx(whole.total_s, rel=5e-3)


@given(pipelines())
def test_a_step_is_no_shorter_than_the_work_of_its_fullest_rank(pipeline):
    """A step takes at least its fullest rank's work, and at most all work in sequence."""
    schedule, stages, micro_batches, virtual = pipeline
    work = [micro_batches * (stage.forward_s + stage.backward_s) for stage in stages]
    owners = stage_ranks(schedule, len(stages) // virtual, virtual)
    sent = 2 * micro_batches * sum(stage.send_s for stage in stages)
    for overlaps in (False, True):
        found = schedule_time(schedule, tuple(stages), micro_batches, virtual, overlap_sends=overlaps)
        assert max(np.bincount(owners, work)) * (1 - 1e-9) <= found <= (sum(work) + sent) * (1 + 1e-9)


@st.composite
def orders(draw):
    """Arguments of `order_times`: values that later stages read too, and work of each stage that runs once."""
    schedule, ranks = draw(st.sampled_from([*SCHEDULES])), draw(st.integers(1, 3))
    virtual = draw(st.sampled_from(SCHEDULES[schedule].numbers_of_stages(2)))
    counts = [number for number in range(1, 9) if admits(schedule, ranks, number, virtual)]
    shape = (schedule, ranks, draw(st.sampled_from(counts)), virtual)
    stages = ranks * virtual
    transfers = {item: draw(EIGHTHS) for item in neighbours(stages)}
    for early, late in draw(st.lists(st.sampled_from([*combinations(range(stages), 2), (0, 0)]), max_size=4)):
        if early < late:
            transfers[Transfer("x", early, late, True)] = draw(EIGHTHS)
            transfers[Transfer("dx", late, early, False)] = draw(EIGHTHS)
    times = np.array([[draw(EIGHTHS) for _ in range(6)] for _ in range(stages)])
    return shape, stage_ranks(schedule, ranks, virtual), times, transfers, draw(st.booleans())


def longest_path(shape, owners, times, transfers, clips_norm):
    """The step as the longest path through actions and transfers, with the transfers of each link in order."""
    graph, makers = networkx.DiGraph(), {}
    begun, reads = set(), defaultdict(list)
    for item in transfers:
        reads[item.reader, item.is_forward].append(item)
    lasts = []
    for rank, order in enumerate(rank_orders(*shape)):
        before, links = None, {}
        for action in (action for slot in order for action in slot):
            stage, kind, index = action
            seconds = times[stage, kind] + (times[stage, 4] if kind is F and stage not in begun else 0.0)
            begun.add(stage)
            graph.add_node(action, cost=seconds)
            if before is not None:
                graph.add_edge(before, action)
            before = action
            if kind is W:
                continue
            makers[stage, kind is F, index] = action
            for item in transfers:
                if (item.maker, item.is_forward) == (stage, kind is F) and owners[item.reader] != rank:
                    send = ("send", item, index)
                    graph.add_node(send, cost=transfers[item])
                    graph.add_edge(action, send)
                    if (last := links.get(owners[item.reader])) is not None:
                        graph.add_edge(last, send)
                    links[owners[item.reader]] = send
        lasts.append(before)
    for (stage, is_forward, index), action in makers.items():
        for item in reads[stage, is_forward]:
            send = ("send", item, index)
            graph.add_edge(send if send in graph else makers[item.maker, is_forward, index], action)
    ends: dict = {}
    for node in networkx.topological_sort(graph):
        ends[node] = graph.nodes[node]["cost"] + max((ends[before] for before in graph.predecessors(node)), default=0)
    free = np.array([ends[last] for last in lasts])
    updates = np.bincount(owners, times[:, 5], len(lasts))
    return float(((free.max() if clips_norm else free) + updates).max())


def _order_times(shape, owners, times, transfers, clips_norm):
    return order_times(
        order_rows(*shape), owners, times[:, :4], transfers, once_s=times[:, 4], update_s=times[:, 5],
        clips_norm=clips_norm,
    )  # fmt: skip


@given(orders())
def test_the_step_is_the_longest_path(drawn):
    """A step takes the longest path, also with transfers between stages that are not neighbours."""
    assert _order_times(*drawn)[0].total_s == pytest.approx(longest_path(*drawn))


@given(orders())
def test_the_timeline_holds_what_ran(drawn):
    """In the timeline, the spans of a stream do not overlap, and each rank's computation adds up."""
    times, line = _order_times(*drawn)
    last: dict[tuple[int, str], float] = {}
    for span in sorted(line.spans, key=lambda span: (span.start_s, span.end_s)):
        assert last.get((span.process, span.stream), 0.0) <= span.start_s + 1e-9
        last[span.process, span.stream] = span.end_s
    for rank, parts in enumerate(times.ranks):
        busy = [span.end_s - span.start_s for span in line.spans if (span.process, span.stream) == (rank, "compute")]
        assert sum(busy) == pytest.approx(parts.compute_s)
        moved = [span for span in line.spans if span.stream == f"to rank {rank}"]
        assert parts.exposed_send_s <= sum(span.end_s - span.start_s for span in moved) + 1e-9
        assert sum((parts.compute_s, parts.exposed_send_s, parts.bubble_s)) == pytest.approx(times.total_s)
        assert min(parts.exposed_send_s, parts.bubble_s) >= -1e-9
    assert line.total_s == pytest.approx(times.total_s)


@pytest.mark.parametrize(("clips_norm", "ends"), [(False, {6.5, 7.5}), (True, {6.5, 9.0})])
def test_updates_wait_for_all_ranks_where_the_norm_is_that_of_all(clips_norm, ends):
    """If the global norm is clipped, all updates start when the last backward has ended. Otherwise each rank's
    starts after its own backward."""
    sent = {Transfer("x", 0, 1, True): 0.5, Transfer("dx", 1, 0, False): 0.0}
    times = np.array([[1.0, 1.5, 0, 0, 0, 0.5], [1.0, 2.0, 0, 0, 0, 3.0]])
    found, line = _order_times(("1F1B", 2, 1), (0, 1), times, sent, clips_norm)
    assert {span.end_s for span in line.spans if span.name == "update"} == ends
    assert found.total_s == max(ends)


@given(orders(), st.data())
def test_slower_parts_never_shorten_the_step(drawn, data):
    """A step takes at least as long when any time of a stage grows."""
    shape, owners, times, transfers, clips_norm = drawn
    slower = times.copy()
    slower[data.draw(st.integers(0, len(times) - 1)), data.draw(st.integers(0, 5))] += data.draw(EIGHTHS)
    before, after = (_order_times(shape, owners, each, transfers, clips_norm)[0] for each in (times, slower))
    assert before.total_s <= after.total_s + 1e-9


def bubble(schedule, stage, ranks, micro_batches, virtual=1):
    """The seconds in which each rank of equal stages is idle."""
    total_s = schedule_time(schedule, (stage,) * (ranks * virtual), micro_batches, virtual, overlap_sends=True)
    return total_s - micro_batches * virtual * (stage.forward_s + stage.backward_s)


@given(st.sampled_from(["GPipe", "1F1B"]), st.integers(1, 8), st.integers(1, 24), EIGHTHS, EIGHTHS)
def test_the_bubble_of_one_stage_a_rank(schedule, ranks, micro_batches, forward, backward):
    """With one stage per rank, a rank is idle for p - 1 forwards and backwards (Huang et al. 2019; Narayanan et
    al. 2021)."""
    stage = StageTimes(forward, backward, 0.25)
    found = bubble(schedule, stage, ranks, micro_batches)
    assert found == pytest.approx((ranks - 1) * (stage.forward_s + stage.backward_s))


@given(
    st.sampled_from(["Interleaved1F1B", "LoopedBFS"]), st.integers(1, 6), st.integers(1, 4), st.integers(2, 4), EIGHTHS
)
def test_interleaving_divides_the_bubble(schedule, ranks, rounds, virtual, forward):
    """With interleaved stages, a rank is idle for p - 1 forwards and backwards of one stage (Narayanan et al.
    2021, 2.2)."""
    stage = StageTimes(forward, forward, forward + 0.25)
    found = bubble(schedule, stage, ranks, ranks * rounds, virtual)
    assert found == pytest.approx((ranks - 1) * (stage.forward_s + stage.backward_s))


@given(st.integers(1, 6), st.integers(2, 4), EIGHTHS)
def test_zero_bubble_h1(ranks, rounds, extra):
    """In ZB-H1 a rank is idle for (p - 1)(F + I - W), a third of 1F1B's time if F = I = W (Qi et al. 2023, table 1)."""
    found = bubble("InterleavedZeroBubble", StageTimes(1.0 + extra, 1.0, 1.0), ranks, ranks * rounds)
    assert found == pytest.approx((ranks - 1) * (1.0 + extra))


@given(st.sampled_from(["ZBVZeroBubble", "DualPipeV"]), st.integers(1, 6), st.integers(0, 6))
def test_the_limit_of_zero_bubble(schedule, ranks, more):
    """With F = I = W, ZBV and DualPipeV are idle for p - 1 forwards alone (Qi et al. 2023, section 6)."""
    found = bubble(schedule, StageTimes(0.5, 0.5, 0.5), ranks, 2 * ranks + more, 2)
    assert found == pytest.approx((ranks - 1) * 0.5)


def test_sends_expose_two_transfers_per_micro_batch():
    """Without overlap, each further micro-batch takes its work and two sends. With overlap, it takes a quarter of
    six sends more than its work."""
    stages = (StageTimes(1, 1, 1, send_s=0.25),) * 4
    few, many = (schedule_time("1F1B", stages, count, overlap_sends=False) for count in (8, 40))
    assert many - few == pytest.approx(32 * (3 + 2 * 0.25))
    few, many = (schedule_time("1F1B", stages, count, overlap_sends=True) for count in (8, 40))
    assert many - few == pytest.approx(32 * (4 * 3 + 6 * 0.25) / 4)  # rank 0 has 4 micro-batches on their round trip


def test_waiting_for_a_transfer_is_no_bubble():
    """Each of two ranks with one micro-batch waits for one transfer, which counts as waiting and not as bubble."""
    none, sent = np.zeros(2), dict.fromkeys(neighbours(2), 0.25)
    actions_s = np.array([StageTimes(1, 1, 1).actions_s] * 2)
    times, _ = order_times(order_rows("GPipe", 2, 1), (0, 1), actions_s, sent, once_s=none, update_s=none)
    assert times.total_s == 6.5
    assert [(rank.exposed_send_s, rank.bubble_s) for rank in times.ranks] == [(0.25, 3.25)] * 2
