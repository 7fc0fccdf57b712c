"""Steps on streams, compared with longest paths, bounds, and cases computed by hand."""

from __future__ import annotations

import networkx
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cost_models.errors import CostArgumentError
from cost_models.streams import Op, Segment, measured_slowdown, simulate_streams
from cost_models.timeline import COMPUTE

EIGHTHS = st.integers(0, 16).map(lambda number: number / 8)


@st.composite
def segments(draw):
    """A segment of computations and communications on three streams."""
    ops: list[Op] = []
    for index in range(draw(st.integers(0, 7))):
        stream = draw(st.sampled_from([COMPUTE, COMPUTE, "fabric", "network"]))
        needs = draw(st.sets(st.integers(0, index - 1), max_size=2)) if index else ()
        label = "work" if stream == COMPUTE else draw(st.sampled_from(["data", "model"]))
        ops.append(Op(f"op{index}", label, draw(EIGHTHS), stream, tuple(sorted(needs))))
    return Segment("block", tuple(ops))


@st.composite
def steps(draw):
    """A step in which some segments repeat."""
    kinds = draw(st.lists(segments(), min_size=1, max_size=3))
    return draw(st.lists(st.sampled_from(kinds), max_size=6))


def parts(step):
    """The summed seconds of computation, and of communication."""
    ops = [op for segment in step for op in segment.ops]
    compute = sum(op.seconds for op in ops if op.stream == COMPUTE)
    return compute, sum(op.seconds for op in ops) - compute


def longest_path(step):
    """The step as the longest path through all its operations, by the rules of the module's docstring."""
    graph, last = networkx.DiGraph(), {}
    for number, segment in enumerate(step):
        for index, op in enumerate(segment.ops):
            graph.add_node((number, index), cost=op.seconds)
            after = [(number, need) for need in op.needs]
            if op.stream != COMPUTE and not after:
                after = [last.get(COMPUTE)]
            for before in (last.get(op.stream), *after):
                if before is not None:
                    graph.add_edge(before, (number, index))
            last[op.stream] = number, index
    ends = {}
    for node in networkx.topological_sort(graph):
        ends[node] = graph.nodes[node]["cost"] + max((ends[before] for before in graph.predecessors(node)), default=0)
    return max(ends.values(), default=0.0)


@given(steps())
def test_the_step_is_the_longest_path(step):
    """Without slowdown the step is the longest path through streams and dependencies."""
    assert simulate_streams(step, 0.0).total_s == pytest.approx(longest_path(step))


@given(steps(), st.sampled_from([0.0, 0.25, 1.0]))
def test_the_step_lies_between_its_parts(step, slowdown):
    """A step takes at least its computation and its busiest stream, at most their sum, and its parts add up."""
    times = simulate_streams(step, slowdown)
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
    """Without overlap, all communication is exposed and the step is the sum."""
    times = simulate_streams(step)
    compute, communication = parts(step)
    assert times.total_s == pytest.approx(compute + communication)
    assert sum(times.exposed_s.values()) == pytest.approx(communication)
    assert times.slowdown_s == 0


def covered_s(start_s, end_s, cover):
    """The seconds of an interval that disjoint intervals cover."""
    return sum(max(0.0, min(end_s, last) - max(start_s, first)) for first, last in cover)


@given(steps(), st.sampled_from([0.0, 0.5]))
def test_the_timeline_has_every_operation(step, slowdown):
    """The timeline has a span for each operation, and communication outside of computation is at least the exposed
    time."""
    times = simulate_streams(step, slowdown)
    assert len(times.timeline.spans) == sum(len(segment.ops) for segment in step)
    computing = [(span.start_s, span.end_s) for span in times.timeline.spans if span.stream == COMPUTE]
    others = [(span.start_s, span.end_s) for span in times.timeline.spans if span.stream != COMPUTE]
    bare = sum(end - start - covered_s(start, end, computing) for start, end in others)
    assert bare + 1e-9 >= sum(times.exposed_s.values())


@given(steps(), st.data())
def test_faster_parts_never_slow_the_step(step, data):
    """If an operation takes half as long, the step takes no longer."""
    assume(any(segment.ops for segment in step))
    segment = data.draw(st.sampled_from([segment for segment in step if segment.ops]))
    index = data.draw(st.integers(0, len(segment.ops) - 1))
    ops = list(segment.ops)
    ops[index] = ops[index]._replace(seconds=ops[index].seconds / 2)
    faster = Segment(segment.name, tuple(ops))
    changed = [faster if item is segment else item for item in step]
    assert simulate_streams(changed, 0.0).total_s <= simulate_streams(step, 0.0).total_s + 1e-9


@given(steps(), st.sampled_from([None, 0.0]), st.sampled_from([0.125, 1.0]))
def test_the_host_holds_the_device_up(step, slowdown, dispatch):
    """With a host that issues kernels, a step takes at least the issue time and at most that plus the device's
    time. Its parts add up."""
    free = simulate_streams(step, slowdown)
    times = simulate_streams(step, slowdown, dispatch_s=dispatch)
    issue = dispatch * sum(op.launches for segment in step for op in segment.ops)
    assert max(issue, free.total_s) - 1e-9 <= times.total_s <= issue + free.total_s + 1e-9
    parts = sum(times.compute_s.values()) + times.slowdown_s + sum(times.exposed_s.values()) + times.host_s
    assert parts == pytest.approx(times.total_s)


def issued_time(kernels_s, dispatch_s):
    """Seconds from the first call on the host until a stream's last kernel has run."""
    end = issued = 0.0
    for kernel_s in kernels_s:
        issued += dispatch_s
        end = max(end, issued) + kernel_s
    return end


@given(st.lists(EIGHTHS, max_size=12), st.sampled_from([0.25, 1.0]))
def test_computation_alone_takes_its_issued_time(kernels, dispatch):
    """A kernel starts when it is issued and the previous kernel has ended."""
    step = [Segment("block", tuple(product("mm", seconds) for seconds in kernels))]
    assert simulate_streams(step, dispatch_s=dispatch).total_s == pytest.approx(issued_time(kernels, dispatch))


def product(name, seconds, *needs):
    """An operation of computation with this name, seconds and needs."""
    return Op(name, "forward", seconds, needs=needs)


def test_a_gather_over_two_axes_runs_one_after_the_other():
    """Gathers over two axes run in sequence, and each axis exposes its own time."""
    ops = (
        Op("over data", "data", 2.0, "network"), Op("over model", "model", 1.0, "fabric", (0,)), product("mm", 4.0, 1),
    )  # fmt: skip
    times = simulate_streams([Segment("block", ops)], 0.0)
    assert (times.total_s, times.exposed_s) == (7.0, {"data": 2.0, "model": 1.0})
    times = simulate_streams([Segment("block", ops)], 0.0, dispatch_s=0.5)
    assert (times.total_s, times.exposed_s, times.host_s) == (7.5, {"data": 2.0, "model": 1.0}, 0.5)


def test_a_blocking_all_reduce_is_exposed():
    """An all-reduce of tensor parallelism is exposed, because the next product needs its result."""
    block = Segment("block", (product("up", 1), Op("all-reduce", "model", 2, "fabric", (0,)), product("down", 1, 1)))
    assert simulate_streams([block] * 3, 0.0).exposed_s == {"model": 6.0}


def test_a_reduction_that_nobody_waits_for_is_exposed_at_the_end_only():
    """A reduction after each block runs beside the next block, and only the last one is exposed."""
    block = Segment("block", (product("mm", 4.0), Op("reduce", "data", 3.0, "network", (0,))))
    times = simulate_streams([block] * 5, 0.0)
    assert (times.total_s, times.exposed_s, times.overlapped_s) == (23.0, {"data": 3.0}, {"data": 12.0})


def test_communication_slows_computation():
    """With a slowdown of one half, 1.5 s of communication delay the computation by 0.5 s."""
    block = Segment("block", (product("a", 1.0), Op("reduce", "data", 1.5, "network", (0,)), product("b", 2.0)))
    times = simulate_streams([block], 0.5)
    assert times.slowdown_s == pytest.approx(0.5)
    assert times.total_s == pytest.approx(3.5)


def test_the_slowdown_has_a_source():
    """The slowdown is the published mean, 0.189."""
    assert measured_slowdown() == 0.189


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (Op("a", "x", -1.0), "seconds=-1.0"),
        (Op("a", "x", 1.0, needs=(1,)), "needs operation 1, which is not before it"),
    ],
)
def test_impossible_operations_raise(op, message):
    """An operation with negative seconds, or with a need that is not before it, is refused."""
    with pytest.raises(CostArgumentError, match=message):
        simulate_streams([Segment("block", (product("mm", 1.0), op))])
