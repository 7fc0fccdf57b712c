"""Forwards and backwards of a program that is cut into the stages of a pipeline, in the order that was proven.

Where one process simulates all ranks it runs all stages, taking turns as pipeline ranks would; with processes, each
runs the stages of its rank. Values that cross stages go by way of `StageMessages`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autoshard.graphs.owned_results import owned_results
from autoshard.ir.lowered import BackwardHalves, LocalSlot
from autoshard.ir.pipeline_order import Slot, StageTask, Work
from autoshard.ir.program import InputKind
from autoshard.ir.staged import Crossing, StagedProgram
from autoshard.runtime.engine import Engine, Loaded, LocalValue
from autoshard.runtime.executable import Executable
from autoshard.runtime.stages.crossing_table import CrossingTable
from autoshard.runtime.stages.stage_messages import StageMessages

Given = Mapping[tuple[InputKind, str], torch.Tensor]
"""Tensors that a micro-batch's call passes, and the model's own, by kind and name."""

Take = Callable[[LocalSlot, LocalValue], Any]
"""Keeps a result that is handed out, or a part of it."""


@dataclass(slots=True)
class Stage:
    """A stage that this process runs.

    Args:
        number: its place in the pipeline.
        program: what it runs.
        sends: what its forward, and what its backward makes for other stages.
        halves: its backward in two, where the order cuts it.
        held: what is computed once for all micro-batches.
        saved: what micro-batches keep for their backward.
        kept: what first halves keep for the second, by micro-batch.
        carried: the gradients so far.
        owned: which of them may be written over; None: all.
    """

    number: int
    program: Executable
    sends: Mapping[bool, Sequence[Crossing]]
    halves: Halves | None = None
    held: list[LocalValue] | None = None
    saved: dict[int, list[LocalValue]] = field(default_factory=dict)
    kept: dict[int, list[LocalValue]] = field(default_factory=dict)
    carried: list[LocalValue] | None = None
    owned: Sequence[bool] | None = None

    def add(self, carried: list[LocalValue], owned: Sequence[bool]) -> None:
        """Add a micro-batch's gradients; `owned`: which may be written over."""
        if self.carried is None:
            self.carried, self.owned = carried, owned
            return
        self.program.engine.add(self.carried, carried, self.owned)
        self.owned = None


@dataclass(frozen=True, slots=True)
class Halves:
    """The halves of a backward, ready to run; `owned`: which results of the second may be written over."""

    inputs: Loaded
    weights: Loaded
    owned: Sequence[bool]

    @classmethod
    def of(cls, cut: BackwardHalves, engine: Engine) -> Halves:
        """Load both."""
        return cls(engine.load(cut.inputs), engine.load(cut.weights), owned_results(cut.weights.graph))


def load_stages(executable: Executable) -> list[Stage]:
    """The stages of a program that this process runs, ready to run forwards and backwards; all ranks call it."""
    staged = executable.compiled.staged
    assert staged is not None, "the program is cut into stages"
    return [_load(number, program, staged) for number, program in executable.stages.items()]


def _load(number: int, program: Executable, staged: StagedProgram) -> Stage:
    program.load_both_ways()
    sends = {
        way: [item for item in staged.crossings if item.maker == number and item.is_forward == way]
        for way in (True, False)
    }
    cut = staged.stages[number].phased.halves
    return Stage(number, program, sends, None if cut is None else Halves.of(cut, program.engine))


@dataclass(slots=True)
class StagedRun:
    """Forwards and backwards of a call.

    Args:
        table: what the program's stages hand each other.
        stages: those that run here, by number.
        messages: between stages.
        given: for each micro-batch, what its call passes.
        weights: what each micro-batch counts in the loss.
        take: keeps results that are handed out.
        results: those of stages that run here, by micro-batch and name.
    """

    table: CrossingTable
    stages: Mapping[int, Stage]
    messages: StageMessages
    given: Sequence[Given]
    weights: Sequence[float]
    take: Take
    results: dict[tuple[int, str], Any] = field(default_factory=dict)

    @property
    def staged(self) -> StagedProgram:
        """The program."""
        return self.table.staged

    def run(self) -> None:
        """Run the order of each rank of the pipeline that runs here; several take turns."""
        self.messages.begin(self.table, self.weights)
        ranks = sorted({self.staged.order.stage_ranks[number] for number in self.stages})
        left = {rank: list(reversed(self.staged.order.ranks[rank])) for rank in ranks}
        while any(left.values()):
            turns = [self._run_next(slots) for slots in left.values() if slots]
            assert any(turns), "the order was proven to end"
        self.messages.end()

    def _run_next(self, slots: list[Slot]) -> bool:
        """Run a rank's next slot; False where what it reads is not there yet."""
        if not all(self._is_ready(task) for task in slots[-1]):
            return False
        for task in slots.pop():
            match task.work:
                case Work.FORWARD:
                    self._run_forward(self.stages[task.stage], task.micro_batch)
                case Work.BACKWARD:
                    self._run_backward(self.stages[task.stage], task.micro_batch)
                case Work.BACKWARD_INPUT:
                    self._run_first_half(self.stages[task.stage], task.micro_batch)
                case Work.BACKWARD_WEIGHT:
                    self._run_second_half(self.stages[task.stage], task.micro_batch)
                case Work.RECEIVE_FORWARD | Work.RECEIVE_BACKWARD:
                    self.messages.expect(task.stage, task.micro_batch, is_forward=task.work is Work.RECEIVE_FORWARD)
        return True

    def _is_ready(self, task: StageTask) -> bool:
        if task.work.is_transfer or task.work is Work.BACKWARD_WEIGHT or self._is_skipped(task):
            return True
        return self.messages.has_all(task.stage, task.micro_batch, is_forward=task.work is Work.FORWARD)

    def _is_skipped(self, task: StageTask) -> bool:
        """Nothing counts in the micro-batch: its gradient may be zero over zero."""
        return task.work is not Work.FORWARD and not self.weights[task.micro_batch]

    def _run_forward(self, stage: Stage, micro_batch: int) -> None:
        program, given = stage.program, self.given[micro_batch]
        tensors: list[Any] = [given.get((InputKind(slot.slot.kind), slot.slot.name)) for slot in program.inputs]
        if stage.held is None:
            stage.held = program.run_hoisted(tensors)
        values = [
            self._received(slot, stage, micro_batch, is_forward=True)
            if tensor is None
            else program.engine.read(tensor, slot)
            for tensor, slot in zip(tensors, program.inputs, strict=True)
        ]
        results, stage.saved[micro_batch] = program.run_forward_on([*values, *stage.held])
        self._send(stage, micro_batch, program.outputs, results, is_forward=True)
        for slot, value in zip(program.outputs, results, strict=True):
            if slot.slot.name in self.staged.results:
                self.results[micro_batch, slot.slot.name] = self.take(slot, value)

    def _run_backward(self, stage: Stage, micro_batch: int) -> None:
        values = self._taken(stage, micro_batch)
        if values is not None:
            sent, carried = stage.program.run_backward_on(values)
            self._send(stage, micro_batch, stage.program.gradients, sent, is_forward=False)
            stage.add(carried, stage.program.owned_gradients)

    def _run_first_half(self, stage: Stage, micro_batch: int) -> None:
        values = self._taken(stage, micro_batch)
        if values is not None:
            assert stage.halves is not None, "the order cuts backwards"
            results, count = list(stage.halves.inputs(values)), len(stage.program.gradients)
            self._send(stage, micro_batch, stage.program.gradients, results[:count], is_forward=False)
            stage.kept[micro_batch] = results[count:]

    def _run_second_half(self, stage: Stage, micro_batch: int) -> None:
        if self.weights[micro_batch]:
            assert stage.halves is not None, "the order cuts backwards"
            stage.add(list(stage.halves.weights(stage.kept.pop(micro_batch))), stage.halves.owned)

    def _taken(self, stage: Stage, micro_batch: int) -> list[LocalValue] | None:
        """Values that a backward takes, perhaps none; None where its micro-batch has no weight, and it does not run."""
        saved, weight = stage.saved.pop(micro_batch), self.weights[micro_batch]
        if not weight:
            return None
        return saved + [self._tangent(slot, stage, micro_batch, weight) for slot in stage.program.tangents]

    def _tangent(self, slot: LocalSlot, stage: Stage, micro_batch: int, weight: float) -> LocalValue:
        """A gradient that a backward takes: of the loss, the micro-batch's share; else what a later stage sent."""
        if slot.slot.name in map(_tangent_of, self.staged.results):
            engine = stage.program.engine
            return engine.read(torch.full((), weight, dtype=slot.dtype, device=engine.device), slot)
        return self._received(slot, stage, micro_batch, is_forward=False)

    def _received(self, slot: LocalSlot, stage: Stage, micro_batch: int, *, is_forward: bool) -> LocalValue:
        value, made = self.messages.take(slot.slot.name, stage.number, micro_batch, is_forward=is_forward)
        return stage.program.engine.reshard(value, made, slot)

    def _send(
        self, stage: Stage, micro_batch: int, slots: Sequence[LocalSlot], values: Sequence[LocalValue], *,
        is_forward: bool,
    ) -> None:  # fmt: skip
        made = {slot.slot.name: value for slot, value in zip(slots, values, strict=True)}
        for crossing in stage.sends[is_forward]:
            self.messages.send(crossing, micro_batch, made[crossing.name])


def _tangent_of(result: str) -> str:
    return result.replace("output:", "tangent:")
