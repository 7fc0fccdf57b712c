"""`run_order` runs the tasks of pipeline ranks in their order; pipeline ranks that share a process take turns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from autoshard.ir.pipeline_order import PipelineOrder, Slot, StageTask


class TaskRunner(Protocol):
    """Runs one task of a step at a time."""

    def can_run(self, task: StageTask) -> bool:
        """Whether a task can run now: the values that it reads are there, or come from another process."""
        ...

    def run_task(self, task: StageTask) -> None:
        """Run a task; wait for values from other processes."""
        ...


def run_order(order: PipelineOrder, ranks: Iterable[int], runner: TaskRunner) -> None:
    """Run the tasks of some pipeline ranks, each in its order.

    Args:
        order: the order of all ranks, proven to end.
        ranks: the ranks that this process runs.
        runner: runs each task.
    """
    left = [list(reversed(order.ranks[rank])) for rank in ranks]
    while any(left):
        turns = [_run_next(slots, runner) for slots in left if slots]
        assert any(turns), "the order was proven to end"


def _run_next(slots: list[Slot], runner: TaskRunner) -> bool:
    """Run the tasks of a pipeline rank's next slot, which is the last of `slots`; remove the slot and return True.

    A slot is the tasks that a rank starts at once. Return False, without running a task, if a task cannot run yet.
    """
    if not all(map(runner.can_run, slots[-1])):
        return False
    for task in slots.pop():
        runner.run_task(task)
    return True
