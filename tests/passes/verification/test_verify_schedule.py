"""`verify_schedule` accepts torch's pipeline schedules, and refuses mutations that hang or change numbers.

The sends and receives are autoshard's for all schedules, and also torch's own for schedules with several stages on a
rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby, product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

import autoshard.rules  # noqa: F401  (fills the registry)
from autoshard.errors import VerificationError
from autoshard.ir.pipeline_order import PipelineOrder, Slot, StageTask, Work, one_after_another
from autoshard.testing import schedules
from cost_models.schedule_orders import SCHEDULES, stage_ranks
from passes.lowering.order_pipeline import order_forward, order_pipeline
from passes.verification.verify_schedule import verify_schedule
from tests.benchmarks.mutation_campaign import prove
from tests.passes.mutants import RIGHT_ORDER, mutate_order
from tests.passes.pipeline_numbers import compute
from tests.passes.schedule_mutations import ONE_STAGE_MUTATIONS, SCHEDULE_MUTATIONS, is_refused

ORDER = order_pipeline("1F1B", 2, 2)


def one_device(order: PipelineOrder) -> tuple[list[int], list[int]] | None:
    """Return the losses and gradients of the same stages on one rank, one micro-batch after the other."""
    stages = range(len(order.stage_ranks))
    tasks = [
        StageTask(work, stage, number)
        for number in range(order.micro_batches)
        for work, along in ((Work.FORWARD, stages), (Work.BACKWARD, reversed(stages)))
        for stage in along
    ]
    return compute(PipelineOrder(tuple(0 for _ in stages), order.micro_batches, (tuple((task,) for task in tasks),)))


@given(schedules())
def test_every_schedule_is_accepted_and_computes_what_one_device_does(order: PipelineOrder) -> None:
    """A drawn schedule is accepted, and its losses and gradients equal those of one device."""
    verify_schedule(order)
    assert compute(order) == one_device(order) is not None


@pytest.mark.parametrize("mutate", SCHEDULE_MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_mutations_that_change_numbers_are_refused(mutate: Callable[[PipelineOrder, Random], PipelineOrder]) -> None:
    """In every schedule, a mutation of any kind is refused if the order hangs or gives other losses or gradients."""
    refused = 0
    for schedule, seed in product(SCHEDULES, range(6)):
        order = order_pipeline(schedule, 2 + seed % 2, 6, SCHEDULES[schedule].numbers_of_stages(2)[-1])
        mutant = mutate(order, Random(seed))
        refused += is_refused(mutant)
        assert is_refused(mutant) or compute(mutant) == compute(order), f"{schedule}, seed {seed}"
    assert refused > 0


@given(schedules(), st.sampled_from(SCHEDULE_MUTATIONS), st.integers(0, 99))
def test_any_mutation_of_any_schedule_that_changes_numbers_is_refused(order, mutate, seed: int) -> None:
    """A mutation of a drawn schedule, on several ranks and micro-batches, is refused if it hangs or changes numbers."""
    if len(order.ranks) > 1 and order.micro_batches > 1:
        mutant = mutate(order, Random(seed))
        assert is_refused(mutant) or compute(mutant) == compute(order)


class TorchStage:
    """The attributes of a stage that torch's schedules read."""

    is_first = is_last = False
    submod = None

    def __init__(self, index: int, ranks: int, stages: int):
        self.stage_index, self.group_rank, self.group_size, self.num_stages = index, 0, ranks, stages


def torch_order(schedule: str, ranks: int, micro_batches: int, virtual_stages: int) -> PipelineOrder:
    """Return the order of torch's own schedule, with torch's transfers.

    Actions of other kinds than those of `Work` are left out.
    """
    stages = [TorchStage(stage, ranks, ranks * virtual_stages) for stage in range(virtual_stages)]
    made = torch_schedules.get_schedule_class(schedule)(stages, micro_batches)
    known = {work.value for work in Work}
    slots = (
        tuple(
            tuple(
                StageTask(Work(part.computation_type.value), part.stage_index, part.microbatch_index)
                for part in action.sub_actions or (action,)
            )
            for action in made.pipeline_order_with_comms[rank]
            if action.sub_actions or action.computation_type.value in known
        )
        for rank in range(ranks)
    )
    return PipelineOrder(stage_ranks(schedule, ranks, virtual_stages), micro_batches, tuple(slots))


@pytest.mark.parametrize("schedule", [name for name, item in SCHEDULES.items() if item.most_stages != 1])
@pytest.mark.parametrize("ranks", [2, 4])
def test_torchs_own_transfers_are_accepted(schedule: str, ranks: int) -> None:
    """Torch's own orders with two stages per rank are accepted, and mutations that change their numbers are refused."""
    order = torch_order(schedule, ranks, 8, 2)
    verify_schedule(order)
    assert compute(order) == one_device(order)
    for mutate in SCHEDULE_MUTATIONS:
        mutant = mutate(order, Random(ranks))
        assert is_refused(mutant) or compute(mutant) == compute(order), mutate.__name__


@given(schedules())
def test_transfers_issued_as_one_are_accepted_where_they_end(order: PipelineOrder) -> None:
    """If consecutive transfers are issued as one, an order is refused exactly if it deadlocks."""
    joined = replace(order, ranks=tuple(tuple(_joined(slots)) for slots in order.ranks))
    assert is_refused(joined) == (compute(joined) is None)


def _joined(slots: tuple[Slot, ...]) -> Iterator[Slot]:
    for is_transfer, run in groupby(slots, lambda slot: slot[0].work.is_transfer):
        found = tuple(run)
        yield from (tuple(task for slot in found for task in slot),) if is_transfer else found


def test_a_circle_is_refused() -> None:
    """A circle of ranks that receive before they send is refused."""
    first, second = ORDER.ranks
    receive = next(slot for slot in first if slot[0].work is Work.RECEIVE_BACKWARD)
    early = (receive, *(slot for slot in first if slot is not receive))
    with pytest.raises(VerificationError, match=r"the pipeline never ends: .*0RECV_B0 waits for rank 1"):
        verify_schedule(replace(ORDER, ranks=(early, second)))


@pytest.mark.parametrize(
    ("rank", "before", "after", "says"),
    [
        (0, "0SEND_F1", "", "stage 0's output of micro-batch 1 is sent 0 times and received once between rank 0 and"),
        (1, "1B1", "", r"stage 1 runs backward \[0\] whole, \[\] for its input"),
        (1, "1F1", "1F0", r"stage 1 runs the forward of micro-batches \[0, 0\], not \[0, 1\] in order"),
        (0, "0F1", "1F1", r"rank 0 runs 1F1; stages lie on ranks \(0, 1\)"),
        (0, "0SEND_F1", "0SEND_B1", "rank 0 runs 0SEND_B1, which leads to no other rank"),
        (0, "0F0 0SEND_F0", "0SEND_F0 0F0", "runs 0SEND_F0 before it has computed stage 0's output of micro-batch 0"),
        (1, "1RECV_F1", "1RECV_F1+1F1", r"slot 1RECV_F1\+1F1 is empty, or computes and transfers at once"),
        (0, "0SEND_F0", "0SEND_F0#5", r"rank 0 sends 0SEND_F0 \(tag 5\) where rank 1 receives 1RECV_F0 \(tag 0\)"),
    ],
)
def test_messages(rank: int, before: str, after: str, says: str) -> None:
    """Errors about a wrong order name the rank, the stage or the task."""
    with pytest.raises(VerificationError, match=says):
        verify_schedule(with_text(rank, before, after))


def with_text(rank: int, before: str, after: str) -> PipelineOrder:
    """Return `ORDER` with some slots of a rank replaced, in printed form; `#5` gives a tag."""
    text = f" {' '.join('+'.join(map(str, slot)) for slot in ORDER.ranks[rank])} "
    assert f" {before} " in text
    words = text.replace(f" {before} ", f" {after} ").split()
    slots = tuple(tuple(map(parse, word.split("+"))) for word in words)
    return replace(ORDER, ranks=tuple(slots if index == rank else other for index, other in enumerate(ORDER.ranks)))


def parse(text: str) -> StageTask:
    """Parse a printed task; the default tag of a transfer is its micro-batch."""
    found = re.fullmatch(r"(\d)([A-Z_]+)(\d)(?:#(\d))?", text)
    assert found is not None
    stage, work, number, tag = found.groups()
    return StageTask(Work(work), int(stage), int(number), int(tag or number))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_forward_alone_is_that_of_a_schedules_stages(schedule: str) -> None:
    """A forward alone is accepted with `trains=False`, and refused as a training step or without one receive.

    A training step is refused with `trains=False`.
    """
    virtual_stages = SCHEDULES[schedule].numbers_of_stages(2)[-1]
    order = order_forward(schedule, 3, virtual_stages)
    assert order.stage_ranks == stage_ranks(schedule, 3, virtual_stages)
    verify_schedule(order, trains=False)
    with pytest.raises(VerificationError, match="stage 0 runs backward"):
        verify_schedule(order)
    with pytest.raises(VerificationError, match="stage 0's output of micro-batch 0 is sent once and received 0 times"):
        verify_schedule(replace(order, ranks=(order.ranks[0], order.ranks[1][1:], order.ranks[2])), trains=False)
    with pytest.raises(VerificationError, match="each of micro-batches"):
        verify_schedule(order_pipeline(schedule, 3, 6, virtual_stages), trains=False)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_step_without_stages_is_a_pipeline_of_one(count: int) -> None:
    """In one stage, micro-batches one after another are accepted, and so are all forwards before all backwards."""
    order = one_after_another(count)
    verify_schedule(order)
    slots = sorted(order.ranks[0], key=lambda slot: slot[0].work is Work.BACKWARD)
    verify_schedule(replace(order, ranks=(tuple(slots),)))


@pytest.mark.parametrize(
    ("text", "micro_batches", "says"),
    [
        ("0F1 0B1 0F0 0B0", 2, r"stage 0 runs the forward of micro-batches \[1, 0\], not \[0, 1\] in order"),
        ("0F0 0F1 0B0", 2, r"stage 0 runs backward \[0\] whole"),
        ("0B0 0F0 0F1 0B1", 2, "the pipeline never ends: rank 0 waits before 0B0"),
        ("0F0 0B0 0F1 0B1", 1, r"stage 0 runs the forward of micro-batches \[0, 1\], not \[0\] in order"),
    ],
)
def test_messages_without_stages(text: str, micro_batches: int, says: str) -> None:
    """Errors about a wrong order of one stage describe this order."""
    with pytest.raises(VerificationError, match=says):
        verify_schedule(PipelineOrder((0,), micro_batches, (tuple((parse(word),) for word in text.split()),)))


def test_orders_without_stages_that_change_numbers_are_refused() -> None:
    """Orders of micro-batches that change a step's numbers are refused, for each kind of mutation."""
    _, traced, run = prove("lstm", "ZeRO-1")
    found = [mutant for seed in range(24) if (mutant := mutate_order(run.phased, Random(seed))) is not None]
    assert {mutant.kind for mutant in found} == {mutation.__name__ for mutation in ONE_STAGE_MUTATIONS}
    accepted = [mutant for mutant in found if not mutant.is_refused(traced)]
    assert [mutant.what for mutant in accepted if run.is_changed_by(mutant)] == []
    assert any(run.is_changed_by(mutant) for mutant in found if mutant.kind == "count_otherwise")
    assert RIGHT_ORDER not in [mutant.order for mutant in found if mutant.is_refused(traced)]
