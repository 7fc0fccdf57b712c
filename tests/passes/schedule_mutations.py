"""Mutations of the order of a step's tasks, with one stage or several; each returns a changed order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random

from autoshard.errors import VerificationError
from autoshard.ir.pipeline_order import PipelineOrder, Slot, StageTask, Work
from passes.verification.verify_schedule import verify_schedule

Place = tuple[int, int]
"""A rank, and the place of a slot on the rank."""


def _places(order: PipelineOrder, *works: Work) -> list[Place]:
    """Return the slots whose first task does one of `works`; all slots without `works`."""
    return [
        (rank, place)
        for rank, slots in enumerate(order.ranks)
        for place, slot in enumerate(slots)
        if not works or slot[0].work in works
    ]


def _with_slots(order: PipelineOrder, changed: Mapping[Place, tuple[Slot, ...]]) -> PipelineOrder:
    """Return an order with the slots at some places replaced by any number of slots."""
    ranks = (
        tuple(new for place, slot in enumerate(slots) for new in changed.get((rank, place), (slot,)))
        for rank, slots in enumerate(order.ranks)
    )
    return replace(order, ranks=tuple(ranks))


def _at(order: PipelineOrder, place: Place) -> Slot:
    return order.ranks[place[0]][place[1]]


_SENDS = (Work.SEND_FORWARD, Work.SEND_BACKWARD)
_RECEIVES = (Work.RECEIVE_FORWARD, Work.RECEIVE_BACKWARD)
_COMPUTES = (Work.FORWARD, Work.BACKWARD, Work.BACKWARD_INPUT, Work.BACKWARD_WEIGHT)


def drop_send(order: PipelineOrder, random: Random) -> PipelineOrder:
    """Remove the send of a message."""
    return _with_slots(order, {random.choice(_places(order, *_SENDS)): ()})


def drop_receive(order: PipelineOrder, random: Random) -> PipelineOrder:
    """Remove the receive of a message."""
    return _with_slots(order, {random.choice(_places(order, *_RECEIVES)): ()})


def drop_transfer(order: PipelineOrder, random: Random) -> PipelineOrder:
    """Remove a message at both ends."""
    sent = random.choice(_places(order, *_SENDS))
    message = _at(order, sent)[0].message
    received = next(place for place in _places(order, *_RECEIVES) if _at(order, place)[0].message == message)
    return _with_slots(order, {sent: (), received: ()})


def double_send(order: PipelineOrder, random: Random) -> PipelineOrder:
    """Send a message twice."""
    place = random.choice(_places(order, *_SENDS))
    return _with_slots(order, {place: (_at(order, place), _at(order, place))})


def swap_sends(order: PipelineOrder, random: Random) -> PipelineOrder:
    """Exchange two sends of a rank."""
    return _swap_two(order, random, _SENDS)


def swap_receives(order: PipelineOrder, random: Random) -> PipelineOrder:
    """Exchange two receives of a rank."""
    return _swap_two(order, random, _RECEIVES)


def exchange_slots(order: PipelineOrder, random: Random) -> PipelineOrder:
    """Exchange two slots of a rank."""
    return _swap_two(order, random, ())


def _swap_two(order: PipelineOrder, random: Random, works: tuple[Work, ...]) -> PipelineOrder:
    first = random.choice(_places(order, *works))
    second = random.choice([place for place in _places(order, *works) if place[0] == first[0]])
    return _with_slots(order, {first: (_at(order, second),), second: (_at(order, first),)})


def exchange_neighbours(order: PipelineOrder, random: Random) -> PipelineOrder:
    """Exchange two neighbouring slots, such as a send and its value's computation."""
    rank, place = random.choice([place for place in _places(order) if place[1] > 0])
    first, second = (rank, place - 1), (rank, place)
    return _with_slots(order, {first: (_at(order, second),), second: (_at(order, first),)})


def permute_tags(order: PipelineOrder, random: Random) -> PipelineOrder:
    """Exchange the tags of two sends of a rank."""
    first = random.choice(_places(order, *_SENDS))
    second = random.choice([place for place in _places(order, *_SENDS) if place[0] == first[0]])
    tags = [_at(order, place)[0].tag for place in (second, first)]
    return _with_slots(
        order,
        {place: ((replace(_at(order, place)[0], tag=tag),),) for place, tag in zip((first, second), tags, strict=True)},
    )


def reorder_micro_batches(order: PipelineOrder, random: Random) -> PipelineOrder:
    """Exchange two micro-batches, in one stage or in all stages."""
    first, second = random.sample(range(order.micro_batches), 2)
    stage = random.choice([None, *range(len(order.stage_ranks))])
    other = {first: second, second: first}

    def changed(task: StageTask) -> StageTask:
        if stage not in (None, task.stage):
            return task
        return replace(task, micro_batch=other.get(task.micro_batch, task.micro_batch))

    return _with_tasks(order, changed)


def _with_tasks(order: PipelineOrder, changed: Callable[[StageTask], StageTask]) -> PipelineOrder:
    return replace(order, ranks=tuple(tuple(tuple(map(changed, slot)) for slot in slots) for slots in order.ranks))


def take_other_micro_batch(order: PipelineOrder, random: Random) -> PipelineOrder:
    """Give a task another micro-batch."""
    place = random.choice(_places(order))
    task, *others = _at(order, place)
    other = (task.micro_batch + random.randrange(1, order.micro_batches)) % order.micro_batches
    return _with_slots(order, {place: ((replace(task, micro_batch=other), *others),)})


def take_other_stage(order: PipelineOrder, random: Random) -> PipelineOrder:
    """Give a task to the next or the previous stage."""
    place = random.choice(_places(order))
    task, *others = _at(order, place)
    return _with_slots(order, {place: ((replace(task, stage=task.stage + random.choice((-1, 1))), *others),)})


def drop_task(order: PipelineOrder, random: Random) -> PipelineOrder:
    """Remove a micro-batch's forward, backward, or half a backward from a stage."""
    return _with_slots(order, {random.choice(_places(order, *_COMPUTES)): ()})


def double_task(order: PipelineOrder, random: Random) -> PipelineOrder:
    """Run a task of a stage twice, so that a backward adds its gradients twice."""
    place = random.choice(_places(order, *_COMPUTES))
    return _with_slots(order, {place: (_at(order, place), _at(order, place))})


def cut_backward(order: PipelineOrder, random: Random) -> PipelineOrder:
    """Replace a backward by one of its halves."""
    half = random.choice((Work.BACKWARD_INPUT, Work.BACKWARD_WEIGHT))
    place = random.choice(_places(order, Work.BACKWARD, Work.BACKWARD_INPUT))
    task, *others = _at(order, place)
    return _with_slots(order, {place: ((replace(task, work=half), *others),)})


def count_otherwise(order: PipelineOrder, random: Random) -> PipelineOrder:
    """Change the number of micro-batches, by which losses are divided."""
    counts = [number for number in range(1, 2 * order.micro_batches + 1) if number != order.micro_batches]
    return replace(order, micro_batches=random.choice(counts))


ONE_STAGE_MUTATIONS = (
    exchange_slots,
    exchange_neighbours,
    reorder_micro_batches,
    take_other_micro_batch,
    drop_task,
    double_task,
    count_otherwise,
)
"""Mutations of a step with one stage or several."""

SCHEDULE_MUTATIONS = (
    drop_send,
    drop_receive,
    drop_transfer,
    double_send,
    swap_sends,
    swap_receives,
    permute_tags,
    take_other_stage,
    cut_backward,
    *ONE_STAGE_MUTATIONS,
)


def is_refused(order: PipelineOrder) -> bool:
    """Whether `verify_schedule` refuses an order."""
    try:
        verify_schedule(order)
    except VerificationError:
        return True
    return False
