"""`track` hands the numbers of each step to writers: loss, gradient norm, learning rate, speed and memory.

The numbers of a step are taken when the step ends, and written when the next step ends. So the host does not wait for
an accelerator. Only the first rank writes.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from autoshard.errors import NotAvailableError
from autoshard.ir.plan_parts import Prediction
from autoshard.runtime.train_step import TrainStep
from autoshard.trackers.late_scalars import LateScalars
from autoshard.trackers.step_clock import StepClock
from autoshard.trackers.writer import RunWriter


def track(step: TrainStep, *writers: RunWriter, start: int | None = None) -> Tracker:
    """Write the numbers of each step from now on: loss, gradient norm, learning rate, speed and memory.

    All ranks may call this; only the first rank writes. All numbers are listed in docs/how_to/watch_a_run.md.

    Args:
        step: the step, the result of `autoshard.compile` with an optimizer.
        writers: `TensorBoard(folder)`, `CSV(path)`, `WandB()` or `Progress()` of `autoshard.trackers`. An object of
            your own needs the methods of `RunWriter`, `log` and `close`.
        start: number of steps done before; the next step has the number `start + 1`. None: `step.steps_done`, which
            counts on after `Checkpoints.load`.

    Returns:
        The tracker, a context manager. The numbers of a step are written when the next step ends, so that no step waits
        for the GPU. Leaving the context (or `close`) writes the last step. A tracker that stays open writes it when
        `step` is deleted or the program ends.

    Raises:
        NotAvailableError: `step` is not a training step, or an object is not a writer.

    Example:
        >>> import autoshard, torch, tempfile
        >>> from autoshard.trackers import CSV
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.Flatten(0))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loss_fn = lambda outputs: outputs.square().mean()
        >>> step = autoshard.compile(model, autoshard.Mesh({"data": 2}), optimizer=optimizer, loss_fn=loss_fn)
        >>> path = f"{tempfile.mkdtemp()}/run.csv"
        >>> with autoshard.track(step, CSV(path)):
        ...     for _ in range(3):
        ...         loss = step(torch.ones(8, 4))
        >>> with open(path) as file:
        ...     [line.split(",")[0] for line in file]
        ['step', '1', '2', '3']
    """
    if not isinstance(step, TrainStep):
        raise NotAvailableError(
            f"track({type(step).__name__}): only a training step has numbers to write. Pass the result of "
            "autoshard.compile(model, mesh, optimizer=optimizer)."
        )
    for writer in writers:
        if not isinstance(writer, RunWriter) or isinstance(writer, type):
            raise NotAvailableError(
                f"track(step, {writer!r}): a writer has the methods log(step_number, values) and close(). Pass "
                'TensorBoard("runs/a"), CSV("run.csv"), WandB(), Progress(), or an object with these methods.'
            )
    if start is not None:
        step.count_from(start)
    return Tracker(step, writers)


@dataclass(frozen=True, slots=True)
class _Taken:
    """The numbers of a step.

    Args:
        number: number of the step.
        numbers: loss, gradient norm, learning rates, and numbers that the user added.
        known: numbers that are known on the host.
        time_s: returns the time of the step; None if the step compiled a program.
        predicted: the prediction of the step's plan, or None.
    """

    number: int
    numbers: list[LateScalars]
    known: dict[str, float]
    time_s: Callable[[], float] | None
    predicted: Prediction | None

    def read(self) -> dict[str, float]:
        """Return all numbers by name. Speeds have the definitions of `plan.predicted`."""
        found = {name: value for late in self.numbers for name, value in late.read().items()} | self.known
        if self.predicted is not None:
            found["predicted_step_time_s"] = self.predicted.step_time_s
            found["predicted_peak_memory_bytes"] = float(self.predicted.peak_memory_bytes)
        if self.time_s is None:
            return found
        time_s = found["step_time_s"] = self.time_s()
        if self.predicted is not None and time_s > 0:
            speedup = self.predicted.step_time_s / time_s
            speeds = {"tokens_per_s": self.predicted.tokens_per_s, "mfu": self.predicted.mfu}
            found |= {name: value * speedup for name, value in speeds.items() if value is not None}
        return found


class _Unwritten:
    """The writers of a run, and the numbers of its last step, which wait to be written.

    This object has no reference to the training step, so that Python can delete the step.
    """

    def __init__(self, writers: tuple[RunWriter, ...]) -> None:
        self._writers = writers
        self.waiting: _Taken | None = None

    def write(self) -> None:
        """Hand the waiting numbers to the writers."""
        taken, self.waiting = self.waiting, None
        if taken is not None:
            values = taken.read()
            for writer in self._writers:
                writer.log(taken.number, values)

    def close(self) -> None:
        """Hand the waiting numbers to the writers, and close all writers, even if one of them fails."""
        with ExitStack() as closing:
            for writer in reversed(self._writers):
                closing.callback(writer.close)
            self.write()


class Tracker:
    """Takes the numbers of each step, and hands them to writers. `autoshard.track` makes it."""

    def __init__(self, step: TrainStep, writers: tuple[RunWriter, ...]) -> None:
        self._step = step
        self._clock = StepClock(step.sharded.engine.device)
        self._programs = 0
        control = step.sharded.engine.control
        is_first = control is None or control.channel.rank == control.channel.ranks[0]
        self._unwritten = _Unwritten(writers if is_first else ())
        self._close_once = weakref.finalize(self, self._unwritten.close)
        if is_first:
            step.add_observer(self)

    def begin(self) -> None:
        """Note the start of a step; the step calls this method."""
        self._programs = len(self._step.sharded.programs)
        self._clock.begin()

    def end(self, loss: torch.Tensor) -> None:
        """Take the numbers of a step, and write the numbers of the step before. The step calls this method."""
        time_s = self._clock.end()
        self._unwritten.write()
        has_compiled = len(self._step.sharded.programs) > self._programs
        plan = self._step.plan
        predicted = None if plan is None or not plan.predicted.step_time_s else plan.predicted
        self._unwritten.waiting = _Taken(
            self._step.steps_done,
            [LateScalars({"loss": loss, **self._norm(), **self._learning_rates()})],
            self._known(),
            None if has_compiled else time_s,
            predicted,
        )

    def add(self, **values: float | torch.Tensor) -> None:
        """Add numbers of your own to those of the last step: `tracker.add(accuracy=accuracy)`.

        All ranks may call. Without a step so far, nothing is added.
        """
        if self._unwritten.waiting is not None:
            self._unwritten.waiting.numbers.append(LateScalars(values))

    def close(self) -> None:
        """Write the numbers of the last step, close the writers, and track no further step."""
        self._step.remove_observer(self)
        self._close_once()

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _norm(self) -> dict[str, torch.Tensor]:
        norm = self._step.last_grad_norm if self._step.has_grad_norm else None
        return {} if norm is None else {"grad_norm": norm}

    def _learning_rates(self) -> dict[str, Any]:
        """Return the learning rate of each group of the optimizer: "lr", "lr_1", ..."""
        groups = self._step.optimizer.param_groups
        return {f"lr_{index}" if index else "lr": group["lr"] for index, group in enumerate(groups) if "lr" in group}

    def _known(self) -> dict[str, float]:
        """Return the numbers that the host knows: peak memory, and if used, the scale of the loss and skipped steps."""
        found = {"peak_memory_bytes": float(_peak_bytes(self._step.sharded.engine.device))}
        scale = self._step.loss_scale
        if scale is not None:
            found["loss_scale"] = scale
        if scale is not None or self._step.on_nonfinite == "skip":
            found["skipped_steps"] = float(self._step.skipped_steps)
        return found


def _peak_bytes(device: torch.device) -> int:
    """Return the peak bytes so far: of tensors on an accelerator, or of the whole process on CPUs."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
