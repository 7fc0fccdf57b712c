"""`run_order` runs the tasks of pipeline ranks, each rank's in its order. Pipeline ranks in one process take turns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from autoshard.ir.pipeline_order import PipelineOrder, Slot, StageTask


class TaskRunner(Protocol):
    """Runs the tasks (forwards, backwards, receives) of the pipeline ranks in this process, one at a time."""

    def can_run(self, task: StageTask) -> bool:
        """Whether a task can run now, because no pipeline rank of this process still has to make a value for it."""
        ...

    def run_task(self, task: StageTask) -> None:
        """Run a task, after waiting for values from other processes."""
        ...


def run_order(order: PipelineOrder, ranks: Iterable[int], runner: TaskRunner) -> None:
    """Run the tasks of the pipeline ranks `ranks` in this process, each rank's in its order.

    The order must have been proven to end.
    """
    left = [list(reversed(order.ranks[rank])) for rank in ranks]
    while any(left):
        turns = [_run_next(slots, runner) for slots in left if slots]
        assert any(turns), "the order was proven to end"


def _run_next(slots: list[Slot], runner: TaskRunner) -> bool:
    """Start all tasks of a rank's next slot, which is the last of `slots`, and remove the slot.

    Return False, and start nothing, if one of the tasks cannot run yet.
    """
    if not all(map(runner.can_run, slots[-1])):
        return False
    for task in slots.pop():
        runner.run_task(task)
    return True
