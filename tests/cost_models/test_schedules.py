"""tests cost_models/schedules.py in the simulated reference: closed forms, an independent longest path."""

from __future__ import annotations

from dataclasses import replace

import networkx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.schedule_orders import SCHEDULES, Action, ActionKind, rank_orders, stage_ranks
from cost_models.stages import Pipeline, StageTimes
from tests.cost_models.simulated_pipelines import simulate_pipeline

F, B, I, W = ActionKind  # noqa: E741  the letters of the literature
EIGHTHS = st.integers(0, 16).map(lambda number: number / 8)


@st.composite
def shapes(draw, schedules=(*SCHEDULES,)):
    """(schedule, ranks, micro-batches, virtual stages) that the schedule admits."""
    schedule = draw(st.sampled_from(schedules))
    ranks = draw(st.integers(1, 5))
    least = 2 * ranks if schedule == "DualPipeV" else 1
    virtual = draw(st.sampled_from(SCHEDULES[schedule].numbers_of_stages(3)))
    if schedule.startswith("Interleaved"):
        return schedule, ranks, ranks * draw(st.integers(1, 3)), virtual
    return schedule, ranks, draw(st.integers(least, least + 8)), virtual


@st.composite
def pipelines(draw, schedules=(*SCHEDULES,)):
    """A shape, and times for each of its stages, once-a-step work included."""
    schedule, ranks, micro_batches, virtual = draw(shapes(schedules))
    names = ("forward_s", "backward_input_s", "backward_weight_s", "send_s", "recompute_s", "reduce_s", "update_s")
    stages = [StageTimes(**{name: draw(EIGHTHS) for name in names}) for _ in range(ranks * virtual)]
    return schedule, stages, micro_batches, virtual


def longest_path(schedule, stages, micro_batches, virtual, once_a_step=True):
    """The step as the longest path through actions, transfers, reductions and updates: no simulation at all."""
    graph = networkx.DiGraph()
    ranks = len(stages) // virtual
    owners, orders = stage_ranks(schedule, ranks, virtual), rank_orders(schedule, ranks, micro_batches, virtual)
    for rank, order in enumerate(orders):
        flat = [action for slot in order for action in slot]
        links: dict[int, Action] = {}
        for before, action in zip([None, *flat], flat, strict=False):
            graph.add_node(action, cost=stages[action.stage].action_s(action.kind))
            if before is not None:
                graph.add_edge(before, action)
            _add_transfer(graph, action, owners, stages, links)
        _add_once_a_step(graph, rank, flat, owners, stages, once_a_step)
    for action in [node for node in graph if isinstance(node, Action) and node.kind is not W]:
        for reader in _readers(action, len(stages)):
            if reader in graph:
                graph.add_edge(("send", action) if ("send", action) in graph else action, reader)
    ends: dict = {}
    for node in networkx.topological_sort(graph):
        ends[node] = graph.nodes[node]["cost"] + max((ends[before] for before in graph.predecessors(node)), default=0)
    return max(ends.values())


def _add_transfer(graph, action, owners, stages, links):
    target = action.stage + (1 if action.kind is F else -1)
    if action.kind is W or not 0 <= target < len(stages) or owners[target] == owners[action.stage]:
        return
    send = ("send", action)
    graph.add_node(send, cost=stages[min(action.stage, target)].send_s)
    graph.add_edge(action, send)
    if owners[target] in links:
        graph.add_edge(("send", links[owners[target]]), send)
    links[owners[target]] = action


def _readers(action, stages):
    stage, kind, index = action
    if kind is F:
        return [Action(stage + 1, F, index)] if stage + 1 < stages else []
    return [Action(stage - 1, kind, index) for kind in (B, I)] if stage > 0 else []


def _add_once_a_step(graph, rank, flat, owners, stages, once_a_step):
    """Reductions, one after the other in the order in which the stages complete; then the update."""
    complete = {action.stage: action for action in flat if action.kind in (B, W)}
    finished = sorted(complete, key=lambda stage: flat.index(complete[stage]))
    graph.add_node(("update", rank), cost=sum(stages[s].update_s for s in finished) if once_a_step else 0.0)
    before = None
    for stage in finished:
        graph.add_node(("reduce", stage), cost=stages[stage].reduce_s if once_a_step else 0.0)
        graph.add_edge(complete[stage], ("reduce", stage))
        if before is not None:
            graph.add_edge(("reduce", before), ("reduce", stage))
        before = stage
    graph.add_edge(("reduce", before), ("update", rank))
    graph.add_edge(flat[-1], ("update", rank))


@given(pipelines())
def test_the_step_is_the_longest_path(pipeline):
    """With transfers overlapped, in-order streams and dependencies make a graph whose longest path is the step."""
    line = simulate_pipeline(Pipeline(*pipeline, overlap_sends=True))
    assert line.total_s == pytest.approx(longest_path(*pipeline))


@given(pipelines(), st.booleans(), st.integers(1, 4), st.booleans())
def test_the_step_lies_between_bounds(pipeline, overlap_sends, buckets, clips_norm):
    """At least each rank's own work and the step without what may overlap; at most everything one after another."""
    schedule, stages, micro_batches, virtual = pipeline
    line = simulate_pipeline(Pipeline(*pipeline, overlap_sends=overlap_sends, buckets=buckets, clips_norm=clips_norm))
    bare = [replace(stage, send_s=0.0, reduce_s=0.0, update_s=0.0) for stage in stages]
    assert line.total_s >= longest_path(schedule, bare, micro_batches, virtual) - 1e-9
    serial = sum(
        micro_batches * (stage.forward_s + stage.backward_s + 2 * stage.send_s) + stage.reduce_s + stage.update_s
        for stage in stages
    )
    assert line.total_s <= serial + 1e-9
    for times in line.ranks:
        assert times.compute_s + times.update_s <= line.total_s + 1e-9
    assert sum(line.breakdown.values()) == pytest.approx(line.total_s)
    assert min(min(getattr(times, name) for name in times.__slots__) for times in line.ranks) >= -1e-9


@given(pipelines(), st.booleans(), st.integers(1, 4), st.data())
def test_slower_parts_never_shorten_the_step(pipeline, overlap_sends, buckets, data):
    """Monotone in every time of every stage."""
    schedule, stages, micro_batches, virtual = pipeline
    index = data.draw(st.integers(0, len(stages) - 1))
    name = data.draw(st.sampled_from(["forward_s", "backward_input_s", "backward_weight_s", "send_s", "gather_s"]))
    slower = list(stages)
    slower[index] = replace(stages[index], **{name: getattr(stages[index], name) + data.draw(EIGHTHS)})
    options = {"overlap_sends": overlap_sends, "buckets": buckets}
    before = simulate_pipeline(Pipeline(schedule, stages, micro_batches, virtual, **options))
    after = simulate_pipeline(Pipeline(schedule, slower, micro_batches, virtual, **options))
    assert after.total_s >= before.total_s - 1e-9


@given(pipelines(), st.integers(1, 4))
def test_overlap_never_lengthens_the_step(pipeline, buckets):
    """Nor do more buckets."""
    shut = simulate_pipeline(Pipeline(*pipeline, overlap_sends=False, buckets=buckets))
    free = simulate_pipeline(Pipeline(*pipeline, overlap_sends=True, buckets=buckets))
    assert free.total_s <= shut.total_s + 1e-9
    assert simulate_pipeline(Pipeline(*pipeline, buckets=buckets + 1)).total_s <= (
        simulate_pipeline(Pipeline(*pipeline, buckets=buckets)).total_s + 1e-9
    )


@given(pipelines(), st.booleans())
def test_the_timeline_holds_what_ran(pipeline, overlap_sends):
    """One process per rank; on each stream spans in order; compute adds up; waits are within transfers."""
    line = simulate_pipeline(Pipeline(*pipeline, overlap_sends=overlap_sends))
    last: dict[tuple[int, str], float] = {}
    for span in line.timeline.spans:
        assert last.get((span.process, span.stream), 0.0) <= span.start_s + 1e-9
        last[span.process, span.stream] = span.end_s
    for rank, times in enumerate(line.ranks):
        spans = [span for span in line.timeline.spans if (span.process, span.stream) == (rank, "compute")]
        assert sum(span.end_s - span.start_s for span in spans) == pytest.approx(times.compute_s + times.update_s)
        moved = [span for span in line.timeline.spans if rank == span.process or span.stream == f"to rank {rank}"]
        sends = sum(span.end_s - span.start_s for span in moved if span.stream.startswith("to rank"))
        assert times.exposed_send_s <= sends + 1e-9
    assert line.timeline.total_s == pytest.approx(line.total_s)


@given(st.sampled_from(["GPipe", "1F1B"]), st.integers(1, 8), st.integers(1, 24), EIGHTHS, EIGHTHS)
def test_the_bubble_of_one_stage_a_rank(schedule, ranks, micro_batches, forward, backward):
    """(p - 1) / (m + p - 1) of the step (Huang et al. 2019; Narayanan et al. 2021)."""
    line = simulate_pipeline(Pipeline(schedule, [StageTimes(forward, backward, 0.25)] * ranks, micro_batches))
    assert line.bubble_fraction == pytest.approx((ranks - 1) / (micro_batches + ranks - 1))


@given(
    st.sampled_from(["Interleaved1F1B", "LoopedBFS"]), st.integers(1, 6), st.integers(1, 4), st.integers(2, 4), EIGHTHS
)
def test_interleaving_divides_the_bubble(schedule, ranks, rounds, virtual, forward):
    """(p - 1) / (m v + p - 1): a bubble of p - 1 stages' forwards and backwards (Narayanan et al. 2021, 2.2)."""
    micro_batches = ranks * rounds
    stages = [StageTimes(forward, forward, forward + 0.25)] * (ranks * virtual)
    line = simulate_pipeline(Pipeline(schedule, stages, micro_batches, virtual))
    assert line.bubble_fraction == pytest.approx((ranks - 1) / (micro_batches * virtual + ranks - 1))


@given(st.integers(1, 6), st.integers(2, 4), EIGHTHS)
def test_zero_bubble_h1(ranks, rounds, extra):
    """(p - 1)(F + I - W) for one stage a rank (Qi et al. 2023, table 1): a third of 1F1B's where F = I = W."""
    stages = [StageTimes(1.0 + extra, 1.0, 1.0)] * ranks
    line = simulate_pipeline(Pipeline("InterleavedZeroBubble", stages, ranks * rounds))
    assert line.bubble_s == pytest.approx((ranks - 1) * (1.0 + extra))


@given(st.sampled_from(["ZBVZeroBubble", "DualPipeV"]), st.integers(1, 6), st.integers(0, 6))
def test_the_limit_of_zero_bubble(schedule, ranks, more):
    """Where F = I = W, all that is left is the ramp: rank r starts r forwards late (Qi et al. 2023, section 6)."""
    line = simulate_pipeline(Pipeline(schedule, [StageTimes(0.5, 0.5, 0.5)] * (2 * ranks), 2 * ranks + more, 2))
    assert line.bubble_s == pytest.approx((ranks - 1) * 0.5)


def test_what_a_rank_holds():
    """Micro-batches, and the bytes of the stages they belong to."""
    stages = [StageTimes(1, 1, 1, activation_bytes=10.0 * (index + 1)) for index in range(4)]
    line = simulate_pipeline(Pipeline("1F1B", stages, 8))
    assert line.in_flight == (4, 3, 2, 1)
    assert line.activation_bytes == (40.0, 60.0, 60.0, 40.0)


def test_swaps_expose_two_transfers_per_micro_batch():
    """Without overlap each forward and each backward of the steady state waits for one transfer."""
    stages = [StageTimes(1, 1, 1, send_s=0.25)] * 4
    few, many = (simulate_pipeline(Pipeline("1F1B", stages, micro_batches)).total_s for micro_batches in (8, 40))
    assert many - few == pytest.approx(32 * (3 + 2 * 0.25))
    few, many = (simulate_pipeline(Pipeline("1F1B", stages, count, overlap_sends=True)).total_s for count in (8, 40))
    assert many - few == pytest.approx(32 * (4 * 3 + 6 * 0.25) / 4)  # rank 0 has 4 micro-batches on their round trip


def test_waiting_for_a_transfer_is_no_bubble():
    """Two stages, one micro-batch: each rank waits for one transfer, and for the other's work and transfers besides."""
    line = simulate_pipeline(Pipeline("GPipe", [StageTimes(1, 1, 1, send_s=0.25)] * 2, 1))
    assert line.total_s == 6.5
    assert [times.exposed_send_s for times in line.ranks] == [0.25, 0.25]
    assert [times.bubble_s for times in line.ranks] == [3.25, 3.25]
    assert line.exposed_communication_s == 0.25


def test_gathers_and_reductions_hide_behind_their_stage():
    """Four buckets: the first of the gather and the last of the reduction stay exposed; one bucket exposes all."""
    stage = StageTimes(8.0, 4.0, 4.0, gather_s=4.0, reduce_s=4.0, update_s=2.0)
    shut, open_ = (simulate_pipeline(Pipeline("GPipe", [stage], 1, buckets=buckets)) for buckets in (1, 4))
    assert (shut.total_s, shut.ranks[0].exposed_gather_s, shut.ranks[0].exposed_reduce_s) == (26.0, 4.0, 4.0)
    assert (open_.total_s, open_.ranks[0].exposed_gather_s, open_.ranks[0].exposed_reduce_s) == (20.0, 1.0, 1.0)


def test_clipping_makes_the_updates_wait_for_each_other():
    """The norm needs the gradients of all ranks, the last of which finishes late."""
    stages = [StageTimes(1, 1, 1, update_s=8.0), StageTimes(1, 1, 1)]
    assert simulate_pipeline(Pipeline("GPipe", stages, 1)).total_s == 14.0
    late = [StageTimes(1, 1, 1), StageTimes(1, 1, 1, update_s=8.0)]
    assert simulate_pipeline(Pipeline("GPipe", late, 1)).total_s == 12.0
    assert simulate_pipeline(Pipeline("GPipe", late, 1, clips_norm=True)).total_s == 14.0


def test_pairs_hide_communication():
    """Where each half computes while the other communicates, a pair takes the compute of both, as long as it covers."""
    stage = StageTimes(2.0, 2.0, 2.0, forward_communication_s=1.0, backward_communication_s=1.0)
    apart, together = (
        simulate_pipeline(Pipeline("DualPipeV", [stage] * 8, 32, 2, overlap_pairs=flag)) for flag in (False, True)
    )
    assert apart.ranks[0].compute_s == 2 * 32 * 6.0
    pairs = sum(len(slot) == 2 for slot in rank_orders("DualPipeV", 4, 32, 2)[0])
    assert together.ranks[0].compute_s == 2 * 32 * 6.0 - 2.0 * pairs
    assert together.total_s < apart.total_s
