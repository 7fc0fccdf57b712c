"""Tasks of a pipeline know the message that they send or receive, and print in torch's notation."""

from __future__ import annotations

import pytest

from autoshard.errors import PlanMismatchError
from autoshard.ir.pipeline_order import Message, PipelineOrder, StageTask, Work


@pytest.mark.parametrize(
    ("work", "message", "reader"),
    [
        (Work.FORWARD, Message(2, True, 5), 3),
        (Work.SEND_FORWARD, Message(2, True, 5), 3),
        (Work.RECEIVE_FORWARD, Message(1, True, 5), 2),
        (Work.BACKWARD, Message(2, False, 5), 1),
        (Work.BACKWARD_INPUT, Message(2, False, 5), 1),
        (Work.SEND_BACKWARD, Message(2, False, 5), 1),
        (Work.RECEIVE_BACKWARD, Message(3, False, 5), 2),
    ],
)
def test_both_ends_of_a_transfer_name_one_message(work: Work, message: Message, reader: int) -> None:
    """A task's message has the stage that makes it, the direction and the micro-batch, and names the stage that
    reads it."""
    task = StageTask(work, 2, 5)
    assert task.message == message
    assert task.message.reader == reader
    assert str(task) == f"2{work.value}5"


def test_the_ends_of_a_pipeline_tell_nobody() -> None:
    """A message crosses ranks only between neighbouring stages on different ranks."""
    order = PipelineOrder((0, 1, 1), 1, ((), ()))
    crossing = [Message(stage, forward, 0) for stage in range(3) for forward in (True, False)]
    assert list(filter(order.crosses_ranks, crossing)) == [Message(0, True, 0), Message(1, False, 0)]


@pytest.mark.parametrize(
    ("stage_ranks", "ranks", "message"),
    [
        ([], [], "has the tasks of 0 ranks"),
        ([0, 5], ["0F0", "1F0"], r"puts stages on ranks \[0, 5\]"),
        ([0, 0], ["0F0", "1F0"], "at least one stage"),
        ([0, 1, 0], ["0F0", "1F0"], "has 3 stages in the plan, and 'stages' has 2"),
        (None, None, "has 0 stages in the plan, and 'stages' has 2"),
    ],
)
def test_stages_of_an_edited_order_are_checked(
    stage_ranks: list[int] | None, ranks: list[str] | None, message: str
) -> None:
    """An order whose ranks or stages differ from its plan's is refused."""
    data = None if ranks is None else {"stage_ranks": stage_ranks, "micro_batches": 1, "ranks": ranks}
    with pytest.raises(PlanMismatchError, match=message):
        PipelineOrder.of_plan(data, stages=2)
