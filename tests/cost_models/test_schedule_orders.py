"""Orders of pipeline schedules, compared with torch's own classes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from cost_models.errors import CostArgumentError
from cost_models.schedule_orders import (
    SCHEDULES,
    Action,
    ActionKind,
    admits,
    most_in_flight,
    rank_orders,
    stage_ranks,
)
from tests.cost_models.in_flight import peak_in_flight

F, B, I, W = ActionKind  # noqa: E741  the letters of the literature


class RecordingStage:
    """The attributes of a pipeline stage that torch's schedules use. Its calls are recorded."""

    is_first = False
    is_last = False
    submod = None

    def __init__(self, index: int, rank: int, ranks: int, stages: int):
        self.stage_index, self.group_rank, self.group_size, self.num_stages = index, rank, ranks, stages
        self.ran: list[tuple[int, str, int]] = []

    def forward_one_chunk(self, index, *_, **__):
        self.ran.append((self.stage_index, "F", index))

    def backward_one_chunk(self, index, *_, **__):
        self.ran.append((self.stage_index, "B", index))

    def perform_reduce_grad(self, *_):
        pass

    def get_fwd_recv_ops(self, *_):
        return []

    get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = get_fwd_recv_ops


def torch_orders(schedule, ranks, micro_batches, virtual_stages):
    """The slots that torch's class runs on each rank, as (stage, letter, micro-batch)."""
    if virtual_stages == 1 and schedule in ("GPipe", "1F1B"):
        return [_ran_by_torch(schedule, rank, ranks, micro_batches) for rank in range(ranks)]
    stages = [RecordingStage(index, 0, ranks, ranks * virtual_stages) for index in range(virtual_stages)]
    order = torch_schedules.get_schedule_class(schedule)(stages, micro_batches).pipeline_order
    return [[_letters(action) for action in order[rank] if action is not None] for rank in range(ranks)]


def _ran_by_torch(schedule, rank, ranks, micro_batches):
    """The calls of torch's class with one stage per rank, because its printed order of 1F1B is off by one on the
    last rank."""
    stage = RecordingStage(rank, rank, ranks, ranks)
    running = torch_schedules.get_schedule_class(schedule)(stage, micro_batches)
    running._initialize_stage = lambda *_, **__: None
    running._step_microbatches()
    return [(action,) for action in stage.ran]


def _letters(action):
    parts = action.sub_actions or (action,)
    return tuple((part.stage_index, part.computation_type.value, part.microbatch_index) for part in parts)


_OF_TORCH = (
    "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV",
)  # fmt: skip
"""Schedules of torch.distributed.pipelining; a schedule that only we have is not compared."""


@st.composite
def shapes(draw, schedules=tuple(SCHEDULES)):
    """(schedule, ranks, micro-batches, virtual stages) that the schedule admits."""
    schedule = draw(st.sampled_from(schedules))
    ranks = draw(st.integers(1, 6))
    virtual_stages = draw(st.sampled_from(SCHEDULES[schedule].numbers_of_stages(4)))
    fewest = ranks if schedule == "1F1B" else ranks * virtual_stages if SCHEDULES[schedule].fills else 1
    admitted = [number for number in range(fewest, 19) if admits(schedule, ranks, number, virtual_stages)]
    return schedule, ranks, draw(st.sampled_from(admitted)), virtual_stages


@given(shapes(_OF_TORCH))
def test_the_order_of_each_rank_is_torchs(shape):
    """The order of each rank equals torch's, with stages, micro-batches and overlapped pairs."""
    assert admits(*shape)
    ours = [
        [tuple((a.stage, a.kind.letter, a.micro_batch) for a in slot) for slot in order]
        for order in rank_orders(*shape)
    ]
    assert ours == torch_orders(*shape)


@given(shapes())
def test_what_is_in_flight_is_counted_in_the_order(shape):
    """The most micro-batches in flight, computed from a shorter step, equal those counted in the whole order."""
    assert most_in_flight(*shape) == tuple(peak_in_flight(order) for order in rank_orders(*shape))


@given(shapes())
def test_every_stage_runs_every_micro_batch_once(shape):
    """Each stage has one forward of every micro-batch, and a backward or both of its halves, on its rank and in a
    possible order."""
    schedule, ranks, micro_batches, virtual_stages = shape
    owners = stage_ranks(schedule, ranks, virtual_stages)
    seen: list[Action] = []
    for rank, order in enumerate(rank_orders(*shape)):
        actions = [action for slot in order for action in slot]
        assert all(owners[action.stage] == rank for action in actions)
        seen += actions
    assert len(set(seen)) == len(seen)
    for stage in range(ranks * virtual_stages):
        for index in range(micro_batches):
            kinds = {action.kind for action in seen if (action.stage, action.micro_batch) == (stage, index)}
            assert kinds in ({F, B}, {F, I, W})
    assert _can_run(rank_orders(*shape), ranks * virtual_stages)


def _can_run(orders, stages):
    """Whether all ranks, each in its order, can run without waiting for each other in a circle."""
    done, places, moved = set(), [0] * len(orders), True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while places[rank] < len(order) and all(_ready(action, done, stages) for action in order[places[rank]]):
                done |= {(a.stage, "B" if a.kind is I else a.kind.letter, a.micro_batch) for a in order[places[rank]]}
                places[rank] += 1
                moved = True
    return places == [len(order) for order in orders]


def _ready(action, done, stages):
    stage, kind, index = action
    if kind is F:
        return stage == 0 or (stage - 1, "F", index) in done
    if kind is W:
        return (stage, "B", index) in done
    return (stage, "F", index) in done and (stage == stages - 1 or (stage + 1, "B", index) in done)


@given(st.integers(1, 8), st.integers(1, 20))
def test_one_forward_one_backward_holds_at_most_one_micro_batch_per_later_stage(ranks, micro_batches):
    """A rank of 1F1B holds at most min(m, p - rank) micro-batches, and a rank of GPipe holds all."""
    held = [peak_in_flight(order) for order in rank_orders("1F1B", ranks, micro_batches)]
    assert held == [min(micro_batches, ranks - rank) for rank in range(ranks)]
    assert {peak_in_flight(order) for order in rank_orders("GPipe", ranks, micro_batches)} == {micro_batches}


@given(st.integers(2, 6), st.integers(1, 4), st.integers(2, 4))
def test_interleaving_holds_more(ranks, rounds, virtual_stages):
    """A rank of interleaved 1F1B holds (v - 1) p + 2 (p - 1 - rank) + 1 values of stages, or all (Narayanan et al.)."""
    micro_batches = ranks * rounds
    for rank, order in enumerate(rank_orders("Interleaved1F1B", ranks, micro_batches, virtual_stages)):
        expected = (virtual_stages - 1) * ranks + 2 * (ranks - 1 - rank) + 1
        assert peak_in_flight(order) == min(expected, micro_batches * virtual_stages)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (("Zigzag", 2, 2, 1), "Unknown pipeline schedule 'Zigzag'. Known: GPipe, 1F1B"),
        (("1F1B", 2, 0, 1), "each is at least 1"),
        (("1F1B", 2, 2, 2), "1F1B needs virtual_stages=1; it has 2"),
        (("ZBVZeroBubble", 2, 2, 3), "needs virtual_stages=2; it has 3"),
        (("Interleaved1F1B", 2, 2, 1), "needs virtual_stages of at least 2; it has 1"),
        (("Interleaved1F1B", 4, 9, 2), "takes micro-batches in 2 equal rounds"),
        (("DualPipeV", 4, 7, 2), "at least as many micro-batches as stages"),
    ],
)
def test_what_a_schedule_does_not_admit_is_refused(shape, message):
    """A shape that a schedule does not admit is refused, and the message has the schedule's condition."""
    assert not admits(*shape)
    with pytest.raises(CostArgumentError, match=message):
        rank_orders(*shape)


@pytest.mark.parametrize(("ranks", "micro_batches"), [(4, 9), (3, 4)])
def test_torch_refuses_the_same_rounds(ranks, micro_batches):
    """If torch refuses a number of micro-batches for interleaved stages, `rank_orders` refuses it too."""
    try:
        torch_orders("Interleaved1F1B", ranks, micro_batches, 2)
    except ValueError:
        with pytest.raises(CostArgumentError):
            rank_orders("Interleaved1F1B", ranks, micro_batches, 2)
    else:
        rank_orders("Interleaved1F1B", ranks, micro_batches, 2)
