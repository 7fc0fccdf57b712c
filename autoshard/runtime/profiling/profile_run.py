"""`ProfileRun` measures the next steps of a compiled training step, on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import torch

from autoshard.errors import NotAvailableError
from autoshard.ir.profile import PredictSteps, Profile, StepSpans
from autoshard.ir.request import CompiledProgram
from autoshard.ir.staged import PIPELINE_AXIS
from autoshard.runtime.profiling.record_step import StepRecording
from autoshard.runtime.sharded_module import ShardedModule


class ProfileRun:
    """Measures steps until it has enough, then compares them with the prediction. `TrainStep.profile` makes it.

    The first step only warms up. A step that compiles a program is not measured.

    Args:
        sharded: the model.
        steps: number of steps to measure.
        path: file for the timeline, written by the first rank; None for no file.
        predict: predicts the step of a program.
        on_end: called at the end, with the profile, or with None if no step was measured.
    """

    def __init__(
        self,
        sharded: ShardedModule,
        steps: int,
        path: str | Path | None,
        predict: PredictSteps,
        on_end: Callable[[Profile | None], None],
    ) -> None:
        self._sharded, self._steps, self._path = sharded, steps, path
        self._predict, self._on_end = predict, on_end
        self._measured: list[StepSpans] = []
        self._recording: StepRecording | None = None
        self._is_warm, self._has_ended = False, False
        self._were_on: bool | None = None
        self._programs: tuple[CompiledProgram, ...] = ()
        self._result: Profile | None = None

    @property
    def result(self) -> Profile:
        """The profile.

        Raises:
            NotAvailableError: too few steps have run.
        """
        if self._result is None:
            raise NotAvailableError(
                f"step.profile(steps={self._steps}) has measured {len(self._measured)} steps so far. The first step "
                "warms up, and a step that compiles is not measured: take more steps, or end the `with` block."
            )
        return self._result

    def begin(self) -> None:
        """Begin to record a step; the step calls this method."""
        self._abandon()
        self._programs = self._sharded.programs
        ranges = self._sharded.engine.ranges
        self._were_on, ranges.are_on = ranges.are_on, True
        if self._is_warm:
            self._recording = StepRecording(ranges, self._sharded.engine.device)

    def end(self, loss: torch.Tensor) -> None:
        """End the recording of a step; the step calls this method. If enough steps are measured, call `close`."""
        recording, self._recording = self._recording, None
        spans = None if recording is None else recording.end()
        self._restore_ranges()
        has_compiled = any(all(item is not known for known in self._programs) for item in self._sharded.programs)
        self._programs, self._is_warm = (), True
        if spans is not None and not has_compiled:
            self._measured.append(spans)
        if len(self._measured) == self._steps:
            self.close()

    def close(self) -> None:
        """Measure no further step, and compare the measured steps with the prediction. All ranks must call this."""
        if self._has_ended:
            return
        self._has_ended = True
        self._abandon()
        try:
            if self._measured:
                self._result = found = self._profile()
                if self._path is not None:
                    path = self._path
                    self._sharded.engine.share(lambda: found.write(path))
        finally:
            self._on_end(self._result)

    def __enter__(self) -> ProfileRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the profile with the steps measured so far. After an error, the profile is dropped."""
        if error is not None:
            self._measured.clear()
        self.close()

    def __str__(self) -> str:
        return str(self.result)

    def _abandon(self) -> None:
        """Stop the recording of a step that raised an error."""
        if self._recording is not None:
            self._recording.stop()
            self._recording = None
        self._restore_ranges()

    def _restore_ranges(self) -> None:
        """Switch the ranges as they were before the step."""
        if self._were_on is not None:
            self._sharded.engine.ranges.are_on, self._were_on = self._were_on, None

    def _profile(self) -> Profile:
        program, control = self._sharded.program, self._sharded.engine.control
        assert program is not None, "a step ran"
        assert program.plan is not None, "it was planned"
        predicted, mesh = self._predict(program), program.plan.mesh
        mine = tuple(self._measured)
        if control is None:
            return Profile((mine,), predicted, (0,), is_simulated=True)
        ranks = tuple(control.gather(mine, "gather the profile"))
        coordinates = (mesh.coordinates(rank) for rank in range(len(ranks)))
        return Profile(ranks, predicted, tuple(each.get(PIPELINE_AXIS, 0) for each in coordinates))
