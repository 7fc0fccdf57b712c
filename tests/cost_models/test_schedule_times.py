"""tests cost_models/schedule_times.py: an event simulation, longest paths and closed forms are the references."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import fields, replace
from itertools import combinations

import networkx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.schedule_graph import Transfer, neighbours, schedule_graph
from cost_models.schedule_orders import SCHEDULES, ActionKind, admits, order_rows, rank_orders, stage_ranks
from cost_models.schedule_times import order_times, pipeline_time, pipeline_times
from cost_models.stages import Pipeline, StageTimes
from tests.cost_models.simulated_pipelines import simulate_pipeline

F, B, I, W = ActionKind  # noqa: E741  the letters of the literature
EIGHTHS = st.integers(0, 16).map(lambda number: number / 8)
SECONDS = st.one_of(EIGHTHS, st.floats(0, 2))
OVERLAPS = st.sampled_from([None, False, True])
NAMES = [field.name for field in fields(StageTimes)]


@st.composite
def stage_times(draw):
    """Any times of a stage."""
    return StageTimes(**{name: draw(SECONDS) for name in NAMES})


@st.composite
def pipelines(draw):
    """A schedule, stages (alike, alike but for the ends, or all different), micro-batches, virtual stages."""
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


def assert_same(pipeline, overlap_sends):
    """Both ways to the times of a step agree to rounding."""
    asked = Pipeline(*pipeline, overlap_sends=overlap_sends)
    fast, reference = pipeline_times(asked), simulate_pipeline(asked)
    close = 1e-9 * max(1.0, reference.total_s)
    assert fast.total_s == pytest.approx(reference.total_s, rel=1e-9)
    assert pipeline_time(asked) == fast.total_s
    for one, two in zip(fast.ranks, reference.ranks, strict=True):
        for part in fields(two):
            assert getattr(one, part.name) == pytest.approx(getattr(two, part.name), abs=close), part.name


@given(pipelines(), OVERLAPS)
def test_the_times_are_those_of_the_simulation(pipeline, overlap_sends):
    """For all schedules, stages and ways to overlap."""
    assert_same(pipeline, overlap_sends)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("overlap_sends", [False, True])
def test_long_steps_are_those_of_the_simulation(schedule, overlap_sends):
    """Stages as a model has them: alike but for its ends."""
    virtual = SCHEDULES[schedule].numbers_of_stages(2)[-1]
    stages = [StageTimes(1.0, 1.25, 0.75, 0.1)] * (4 * virtual)
    stages[0], stages[-1] = replace(stages[0], forward_s=1.05), replace(stages[0], forward_s=1.5)
    assert_same((schedule, stages, 80, virtual), overlap_sends)


@pytest.mark.parametrize("schedule", [name for name, item in SCHEDULES.items() if item.repeats])
def test_a_steady_state_is_looked_at_once(schedule):
    """A million micro-batches cost no more nodes than a hundred."""
    virtual = SCHEDULES[schedule].numbers_of_stages(2)[-1]
    stages = [StageTimes(1.0, 1.0, 1.0)] * (4 * virtual)
    few, many = (pipeline_times(Pipeline(schedule, stages, count, virtual)) for count in (100, 1_000_000))
    assert many.nodes == few.nodes
    work = 3.0 * virtual * 999_900
    assert many.total_s - few.total_s == pytest.approx(work)
    assert many.bubble_s == pytest.approx(few.bubble_s, abs=1e-3)


def test_a_late_steady_state_is_waited_for():
    """The last stage is a little slower: the others run ahead for many micro-batches until they wait for it."""
    stages = [StageTimes(1.0, 1.25, 0.75, send_s=0.25)] * 8
    stages[-1] = replace(stages[0], forward_s=1.1)
    pipeline = ("ZBVZeroBubble", stages, 400, 2)
    once = len(schedule_graph("ZBVZeroBubble", 4, 16, 2).first)
    assert pipeline_times(Pipeline(*pipeline)).nodes > 2 * once
    assert_same(pipeline, None)


@st.composite
def orders(draw):
    """The arguments of `order_times`: values pass stages by, once or twice; each stage has work that runs once."""
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
    """The step as the longest path through actions and transfers, each link's in the order in which they are made."""
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
    """Whatever values stages make for each other."""
    assert _order_times(*drawn)[0].total_s == pytest.approx(longest_path(*drawn))


@given(orders())
def test_the_timeline_holds_what_ran(drawn):
    """One process per rank; on each stream spans in order; computation adds up; waits are within transfers."""
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
    """The last stage is done with its backward after 4.5 seconds, and the first after 6."""
    sent = {Transfer("x", 0, 1, True): 0.5, Transfer("dx", 1, 0, False): 0.0}
    times = np.array([[1.0, 1.5, 0, 0, 0, 0.5], [1.0, 2.0, 0, 0, 0, 3.0]])
    found, line = _order_times(("1F1B", 2, 1), (0, 1), times, sent, clips_norm)
    assert {span.end_s for span in line.spans if span.name == "update"} == ends
    assert found.total_s == max(ends)


@given(pipelines(), OVERLAPS, st.data())
def test_slower_parts_never_shorten_the_step(pipeline, overlap_sends, data):
    """Monotone in every time of every stage; nor does overlap lengthen it."""
    schedule, stages, micro_batches, virtual = pipeline
    index, name = data.draw(st.integers(0, len(stages) - 1)), data.draw(st.sampled_from(NAMES))
    slower = list(stages)
    slower[index] = replace(stages[index], **{name: getattr(stages[index], name) + data.draw(EIGHTHS)})
    before, free, after = (
        pipeline_time(Pipeline(schedule, items, micro_batches, virtual, overlap_sends=overlap))
        for items, overlap in ((stages, overlap_sends), (stages, True), (slower, overlap_sends))
    )
    assert free - 1e-9 <= before <= after + 1e-9


def bubble_fraction(pipeline):
    """The bubble as a part of the step."""
    times = pipeline_times(pipeline)
    return times.bubble_s / times.total_s


@given(st.sampled_from(["GPipe", "1F1B"]), st.integers(1, 8), st.integers(1, 24), EIGHTHS, EIGHTHS)
def test_the_bubble_of_one_stage_a_rank(schedule, ranks, micro_batches, forward, backward):
    """(p - 1) / (m + p - 1) of the step (Huang et al. 2019; Narayanan et al. 2021)."""
    found = bubble_fraction(Pipeline(schedule, [StageTimes(forward, backward, 0.25)] * ranks, micro_batches))
    assert found == pytest.approx((ranks - 1) / (micro_batches + ranks - 1))


@given(
    st.sampled_from(["Interleaved1F1B", "LoopedBFS"]), st.integers(1, 6), st.integers(1, 4), st.integers(2, 4), EIGHTHS
)
def test_interleaving_divides_the_bubble(schedule, ranks, rounds, virtual, forward):
    """(p - 1) / (m v + p - 1): a bubble of p - 1 stages' forwards and backwards (Narayanan et al. 2021, 2.2)."""
    micro_batches = ranks * rounds
    stages = [StageTimes(forward, forward, forward + 0.25)] * (ranks * virtual)
    found = bubble_fraction(Pipeline(schedule, stages, micro_batches, virtual))
    assert found == pytest.approx((ranks - 1) / (micro_batches * virtual + ranks - 1))


@given(st.integers(1, 6), st.integers(2, 4), EIGHTHS)
def test_zero_bubble_h1(ranks, rounds, extra):
    """(p - 1)(F + I - W) for one stage a rank (Qi et al. 2023, table 1): a third of 1F1B's where F = I = W."""
    stages = [StageTimes(1.0 + extra, 1.0, 1.0)] * ranks
    times = pipeline_times(Pipeline("InterleavedZeroBubble", stages, ranks * rounds))
    assert times.bubble_s == pytest.approx((ranks - 1) * (1.0 + extra))


@given(st.sampled_from(["ZBVZeroBubble", "DualPipeV"]), st.integers(1, 6), st.integers(0, 6))
def test_the_limit_of_zero_bubble(schedule, ranks, more):
    """The ramp is all that is left where F = I = W: rank r starts r forwards late (Qi et al. 2023, section 6)."""
    times = pipeline_times(Pipeline(schedule, [StageTimes(0.5, 0.5, 0.5)] * (2 * ranks), 2 * ranks + more, 2))
    assert times.bubble_s == pytest.approx((ranks - 1) * 0.5)


def test_swaps_expose_two_transfers_per_micro_batch():
    """Without overlap each forward and each backward of the steady state waits for one transfer."""
    stages = [StageTimes(1, 1, 1, send_s=0.25)] * 4
    few, many = (pipeline_time(Pipeline("1F1B", stages, micro_batches)) for micro_batches in (8, 40))
    assert many - few == pytest.approx(32 * (3 + 2 * 0.25))
    few, many = (pipeline_time(Pipeline("1F1B", stages, count, overlap_sends=True)) for count in (8, 40))
    assert many - few == pytest.approx(32 * (4 * 3 + 6 * 0.25) / 4)  # rank 0 has 4 micro-batches on their round trip


def test_waiting_for_a_transfer_is_no_bubble():
    """Two stages, one micro-batch: each rank waits for one transfer, and for the other's work and transfers besides."""
    times = pipeline_times(Pipeline("GPipe", [StageTimes(1, 1, 1, send_s=0.25)] * 2, 1))
    assert times.total_s == 6.5
    assert [(rank.exposed_send_s, rank.bubble_s) for rank in times.ranks] == [(0.25, 3.25)] * 2
