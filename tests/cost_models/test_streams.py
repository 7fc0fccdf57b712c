"""Streams take the longest path, respect bounds, and equal cases computed by hand."""

from __future__ import annotations

import networkx
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cost_models.errors import CostArgumentError
from cost_models.streams import Op, Overlap, Segment, measured_slowdown, simulate_streams
from cost_models.timeline import COMPUTE

EIGHTHS = st.integers(0, 16).map(lambda number: number / 8)
FREE = Overlap(prefetch=1, slowdown=0.0)


@st.composite
def segments(draw):
    """Draw a segment of computations and communications on two streams, some early, some deferred."""
    ops: list[Op] = []
    for index in range(draw(st.integers(0, 7))):
        stream = draw(st.sampled_from([COMPUTE, COMPUTE, "fabric", "network"]))
        early = stream != COMPUTE and draw(st.booleans())
        allowed = [before for before in range(index) if ops[before].early or not early]
        needs = draw(st.sets(st.sampled_from(allowed), max_size=2)) if allowed else ()
        label = "work" if stream == COMPUTE else draw(st.sampled_from(["data", "model"]))
        ops.append(Op(f"op{index}", label, draw(EIGHTHS), stream, tuple(sorted(needs)), early))
    return Segment("block", tuple(ops), draw(st.booleans()))


@st.composite
def steps(draw):
    """A step in which some segments repeat."""
    kinds = draw(st.lists(segments(), min_size=1, max_size=3))
    return draw(st.lists(st.sampled_from(kinds), max_size=6))


def parts(step):
    """(sum of computation, sum of communication)."""
    ops = [op for segment in step for op in segment.ops]
    compute = sum(op.seconds for op in ops if op.stream == COMPUTE)
    return compute, sum(op.seconds for op in ops) - compute


def longest_path(step, prefetch):
    """The step as the longest path through all its operations, each apart, by the rules of the module's docstring."""
    graph, last = networkx.DiGraph(), {}
    issued, pending = 0, []

    def add(node, seconds, stream, after):
        graph.add_node(node, cost=seconds)
        for before in (last.get(stream), *after):
            if before is not None:
                graph.add_edge(before, node)
        last[stream] = node
        if stream != COMPUTE:
            pending.append(node)

    for number, segment in enumerate(step):
        if segment.is_barrier:
            add(("barrier", number), 0.0, COMPUTE, list(pending))
        begin = last.get(COMPUTE)
        while issued < len(step) and issued <= number + prefetch:
            for index, op in enumerate(step[issued].ops):
                if op.early:
                    needs = [(issued, need) for need in op.needs]
                    add((issued, index), op.seconds, op.stream, needs or [begin])
            issued += 1
        for place in range(-1, len(segment.ops)):
            if place >= 0 and segment.ops[place].stream == COMPUTE:
                op = segment.ops[place]
                add((number, place), op.seconds, COMPUTE, [(number, need) for need in op.needs])
            for index, op in enumerate(segment.ops):
                if op.stream != COMPUTE and not op.early and last_compute(segment, op) == place:
                    needs = [(number, need) for need in op.needs] or [begin]
                    add((number, index), op.seconds, op.stream, needs)
    ends = {}
    for node in networkx.topological_sort(graph):
        ends[node] = graph.nodes[node]["cost"] + max((ends[before] for before in graph.predecessors(node)), default=0)
    return max(ends.values(), default=0.0)


def last_compute(segment, op):
    """The last computation that a communication follows, directly or not."""
    found = -1
    for need in op.needs:
        before = segment.ops[need]
        found = max(found, need if before.stream == COMPUTE else last_compute(segment, before))
    return found


@given(steps(), st.integers(0, 3))
def test_the_step_is_the_longest_path(step, prefetch):
    """Without slowdown the step is the longest path through streams and dependencies, also with merged computation."""
    times = simulate_streams(step, Overlap(prefetch, 0.0))
    assert times.total_s == pytest.approx(longest_path(step, prefetch))


@given(steps(), st.integers(0, 3), st.sampled_from([0.0, 0.25, 1.0]))
def test_the_step_lies_between_its_parts(step, prefetch, slowdown):
    """Never under the computation or the busiest stream, never over the sum, and the parts add up."""
    times = simulate_streams(step, Overlap(prefetch, slowdown))
    compute, communication = parts(step)
    assert times.total_s <= compute * (1 + slowdown) + communication + 1e-9
    assert times.total_s >= compute - 1e-9
    for stream in ("fabric", "network"):
        busy = sum(op.seconds for segment in step for op in segment.ops if op.stream == stream)
        assert times.total_s >= busy - 1e-9
    assert sum(times.compute_s.values()) == pytest.approx(compute)
    assert sum(times.communication_s.values()) == pytest.approx(communication)
    assert compute + times.slowdown_s + sum(times.exposed_s.values()) == pytest.approx(times.total_s)
    assert all(seconds >= 0 for seconds in times.overlapped_s.values())
    assert 0 <= times.slowdown_s <= slowdown * compute + 1e-9


@given(steps())
def test_without_overlap_the_step_is_the_sum(step):
    """All communication is exposed, nothing is slowed."""
    times = simulate_streams(step)
    compute, communication = parts(step)
    assert times.total_s == pytest.approx(compute + communication)
    assert sum(times.exposed_s.values()) == pytest.approx(communication)
    assert times.slowdown_s == 0


def covered_s(start_s, end_s, cover):
    """Return the seconds of an interval that disjoint intervals cover."""
    return sum(max(0.0, min(end_s, last) - max(start_s, first)) for first, last in cover)


@given(steps(), st.integers(0, 2), st.sampled_from([0.0, 0.5]))
def test_the_recorded_step_is_the_same(step, prefetch, slowdown):
    """The recorded step has every operation apart, its spans in order on their streams, and equal total time."""
    overlap = Overlap(prefetch, slowdown)
    plain, recorded = simulate_streams(step, overlap), simulate_streams(step, overlap, record=True)
    assert recorded.total_s == pytest.approx(plain.total_s)
    assert recorded.timeline is not None
    assert len(recorded.timeline.spans) == sum(len(segment.ops) for segment in step)
    computing = [(span.start_s, span.end_s) for span in recorded.timeline.spans if span.stream == COMPUTE]
    others = [(span.start_s, span.end_s) for span in recorded.timeline.spans if span.stream != COMPUTE]
    bare = sum(end - start - covered_s(start, end, computing) for start, end in others)
    assert bare + 1e-9 >= sum(plain.exposed_s.values())


@given(steps(), st.integers(0, 2), st.data())
def test_faster_parts_never_slow_the_step(step, prefetch, data):
    """An operation that takes half as long, computation or communication: in-order streams have no anomalies."""
    assume(any(segment.ops for segment in step))
    segment = data.draw(st.sampled_from([segment for segment in step if segment.ops]))
    index = data.draw(st.integers(0, len(segment.ops) - 1))
    ops = list(segment.ops)
    ops[index] = ops[index]._replace(seconds=ops[index].seconds / 2)
    faster = Segment(segment.name, tuple(ops), segment.is_barrier)
    changed = [faster if item is segment else item for item in step]
    overlap = Overlap(prefetch, 0.0)
    assert simulate_streams(changed, overlap).total_s <= simulate_streams(step, overlap).total_s + 1e-9


@given(steps(), st.integers(0, 2), st.sampled_from([None, 0.0]), st.sampled_from([0.125, 1.0]))
def test_the_host_holds_the_device_up(step, prefetch, slowdown, dispatch):
    """A step is at least as long as the host's issue time, and at most host plus device; chains are exact."""
    overlap = None if slowdown is None else Overlap(prefetch, slowdown)
    free = simulate_streams(step, overlap)
    times = simulate_streams(step, overlap, dispatch_s=dispatch)
    apart = simulate_streams(step, overlap, dispatch_s=dispatch, record=True)
    issue = dispatch * sum(op.launches for segment in step for op in segment.ops)
    assert max(issue, free.total_s) - 1e-9 <= times.total_s <= issue + free.total_s + 1e-9
    assert times.total_s == pytest.approx(apart.total_s)
    parts = sum(times.compute_s.values()) + times.slowdown_s + sum(times.exposed_s.values()) + times.host_s
    assert parts == pytest.approx(times.total_s)


def issued_time(kernels_s, dispatch_s):
    """Seconds from the first call on the host until the last kernel of a stream has run."""
    end = issued = 0.0
    for kernel_s in kernels_s:
        issued += dispatch_s
        end = max(end, issued) + kernel_s
    return end


@given(st.lists(EIGHTHS, max_size=12), st.sampled_from([0.25, 1.0]))
def test_computation_alone_takes_its_issued_time(kernels, dispatch):
    """A kernel ends after its issue and the previous kernel's end, for any length of kernels."""
    step = [Segment("block", tuple(product("mm", seconds) for seconds in kernels))]
    assert simulate_streams(step, dispatch_s=dispatch).total_s == pytest.approx(issued_time(kernels, dispatch))


def product(name, seconds, *needs):
    """A computation."""
    return Op(name, "forward", seconds, needs=needs)


def test_a_gather_hides_behind_the_block_before():
    """With FSDP the first gather is exposed, and later gathers are exposed beyond the previous block."""
    block = Segment("block", (Op("gather", "data", 3.0, "network", early=True), product("mm", 2.0, 0)))
    times = simulate_streams([block] * 4, FREE)
    assert (times.total_s, times.exposed_s, times.overlapped_s) == (14.0, {"data": 6.0}, {"data": 6.0})


def test_a_gather_over_two_axes_runs_one_after_the_other():
    """Gathers over two axes run in sequence, early or not, and each axis exposes its own time."""
    ops = (
        Op("over data", "data", 2.0, "network", early=True),
        Op("over model", "model", 1.0, "fabric", (0,), early=True),
        product("mm", 4.0, 1),
    )
    times = simulate_streams([Segment("block", ops)], FREE)
    assert (times.total_s, times.exposed_s) == (7.0, {"data": 2.0, "model": 1.0})
    times = simulate_streams([Segment("block", ops)], FREE, dispatch_s=0.5)
    assert (times.total_s, times.exposed_s, times.host_s) == (7.5, {"data": 2.0, "model": 1.0}, 0.5)


def test_a_blocking_all_reduce_is_exposed():
    """An all-reduce of tensor parallelism is exposed, because the next product needs its result."""
    block = Segment("block", (product("up", 1), Op("all-reduce", "model", 2, "fabric", (0,)), product("down", 1, 1)))
    assert simulate_streams([block] * 3, FREE).exposed_s == {"model": 6.0}


def test_a_reduction_that_nobody_waits_for_is_exposed_at_the_end_only():
    """Data parallelism: the reductions run behind the backward; the update waits for the last."""
    block = Segment("block", (product("mm", 4.0), Op("reduce", "data", 3.0, "network", (0,))))
    update = Segment("update", (Op("adam", "update", 1.0),), is_barrier=True)
    times = simulate_streams([block] * 5 + [update], FREE)
    assert (times.total_s, times.exposed_s) == (24.0, {"data": 3.0})


def test_communication_slows_computation():
    """Communication slows computation by half: 1.5 s finish 1 s of work, and the rest runs at full speed."""
    block = Segment("block", (product("a", 1.0), Op("reduce", "data", 1.5, "network", (0,)), product("b", 2.0)))
    times = simulate_streams([block], Overlap(0, 0.5))
    assert times.slowdown_s == pytest.approx(0.5)
    assert times.total_s == pytest.approx(3.5)


def test_the_slowdown_has_a_source():
    """The default is the published mean."""
    assert Overlap().slowdown == measured_slowdown() == 0.189


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (Op("a", "x", -1.0), "seconds=-1.0"),
        (Op("a", "x", 1.0, needs=(1,)), "needs operation 1, which is not before it"),
        (Op("a", "x", 1.0, early=True), "only communication can be"),
        (Op("a", "x", 1.0, "network", (0,), early=True), "needs operation 0, which is not"),
    ],
)
def test_impossible_operations_raise(op, message):
    """The message names the operation."""
    with pytest.raises(CostArgumentError, match=message):
        simulate_streams([Segment("block", (product("mm", 1.0), op))])
