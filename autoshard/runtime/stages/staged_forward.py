"""Runs calls without gradients whose program is cut into the stages of a pipeline: the whole batch, stage by stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autoshard.ir.lowered import LocalSlot
from autoshard.runtime.engine import LocalValue
from autoshard.runtime.executable import Executable
from autoshard.runtime.per_program import PerProgram
from autoshard.runtime.stages.crossing_table import CrossingTable
from autoshard.runtime.stages.stage_messages import StageMessages
from autoshard.runtime.stages.staged_run import StagedRun, load_stages


class StagedForward:
    """The calls without gradients of a module whose compiler cuts them into stages.

    Args:
        messages: between the stages.
    """

    def __init__(self, messages: StageMessages) -> None:
        self._messages = messages
        self._tables = PerProgram[CrossingTable]()

    def __deepcopy__(self, memo: dict[int, Any]) -> StagedForward:
        """Itself: copies of a model run on the same ranks."""
        return self

    @torch.no_grad()
    def run(self, executable: Executable, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs of a call on every rank, in the order of `executable.outputs`; all ranks call it.

        Args:
            executable: the program, in stages.
            tensors: global inputs, in the order of `executable.inputs`.
        """
        staged = executable.compiled.staged
        assert staged is not None, "the program is cut into stages"
        table = self._tables.get_or_make(executable, lambda: self._messages.connect(staged))
        given = dict(zip(executable.input_names, tensors, strict=True))
        stages = {stage.number: stage for stage in load_stages(executable)}
        run = StagedRun(table, stages, self._messages, [given], [1.0], take=lambda slot, value: value)
        run.run()
        return [self._output(slot, run, executable) for slot in executable.outputs]

    def _output(self, slot: LocalSlot, run: StagedRun, executable: Executable) -> torch.Tensor:
        """An output: ranks of other stages get the part of the rank with their own coordinates on the other axes."""
        found: LocalValue | None = run.results.pop((0, slot.slot.name), None)
        return executable.write_output(self._messages.share(found, slot.slot.name, run.staged), slot)
