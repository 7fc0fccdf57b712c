"""`ProgramRun` runs the forwards and backwards of a program's micro-batches, stage by stage.

A program without stages is a pipeline of one stage. A process runs the stages of its pipeline rank; if it
simulates all ranks, it runs all stages. `StageMessages` carries values between stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from autoshard.ir.lowered import LocalSlot
from autoshard.ir.pipeline_order import StageTask, Work
from autoshard.ir.range_names import RECEIVING
from autoshard.ir.staged import crosses_stages
from autoshard.runtime.engine import LocalValue
from autoshard.runtime.executable import Executable
from autoshard.runtime.graphed_passes import GraphedPasses
from autoshard.runtime.stages.crossing_table import CrossingTable
from autoshard.runtime.stages.stage_messages import StageMessages

Inputs = Callable[[int], dict[int, Sequence[torch.Tensor]]]
"""Function that takes the number of a micro-batch, and returns the input tensors of each stage by stage number.

These are the tensors of the call and of the model (`Executable.by_stage`).
"""

Take = Callable[[Executable, Sequence[LocalValue], int], None]
"""Function that is called with a stage's program, the local outputs of its forward, and the micro-batch's number."""


@dataclass(slots=True)
class StageRun:
    """A stage that this process runs, in one call.

    Args:
        number: the stage's number.
        program: the stage's program.
        hoisted: local values computed once for all micro-batches; None before the first micro-batch.
        saved: micro-batch → local values that its forward saves for its backward.
        for_second_half: micro-batch → local values that the first half of a split backward saves for the second half.
        graph_gradients: micro-batch → gradients of a backward that ran with its forward in one CUDA graph.
        gradient_sums: the sums of gradients so far; None before the first backward.
        owned: for each sum, whether it may be written over; None: all may be.
    """

    number: int
    program: Executable
    hoisted: list[LocalValue] | None = None
    saved: dict[int, list[LocalValue]] = field(default_factory=dict)
    for_second_half: dict[int, list[LocalValue]] = field(default_factory=dict)
    graph_gradients: dict[int, list[LocalValue]] = field(default_factory=dict)
    gradient_sums: list[LocalValue] | None = None
    owned: Sequence[bool] | None = None

    def run_backward(self, values: list[LocalValue]) -> list[LocalValue]:
        """Run a backward, add its gradients for the update to the sums, and return the gradients for other stages.

        `values` has the saved values, then the local tangents. It is emptied.
        """
        sent, gradients = self.program.run_backward_on(values, self._take_sums())
        self.add(gradients, self.program.owned_gradients)
        return sent

    def run_second_half(self, values: list[LocalValue]) -> None:
        """Run the second half of a split backward on `values` from its first half, and add its gradients to the sums.

        `values` is emptied.
        """
        self.add(*self.program.run_second_half(values, self._take_sums()))

    def _take_sums(self) -> list[LocalValue] | None:
        """Remove and return the sums, for a backward that adds to them and frees the old ones.

        Return None before the first backward, or if the engine adds after the backward.
        """
        if self.gradient_sums is None or not self.program.adds_in_backward:
            return None
        sums, self.gradient_sums = self.gradient_sums, None
        return sums

    def add(self, gradients: list[LocalValue], owned: Sequence[bool]) -> None:
        """Add a micro-batch's gradients to the sums. `owned` says for each gradient whether it may be written over."""
        if self.gradient_sums is None:
            self.gradient_sums, self.owned = gradients, owned
            return
        self.program.engine.add(self.gradient_sums, gradients, self.owned)
        self.owned = None


@dataclass(slots=True)
class ProgramRun:
    """Runs the tasks of a call (forwards, backwards, receives).

    Args:
        table: the values that stages send each other.
        stages: number of a stage → the stage, for the stages that this process runs.
        messages: carries values between stages.
        inputs: returns the inputs of a micro-batch; called once for each micro-batch.
        weights: for each micro-batch of the call, its weight in the loss. A micro-batch of weight zero has no backward.
        take: gets the outputs of each stage's forward.
        graphs: launches forward and backward of a micro-batch as a CUDA graph; None to launch each kernel.
        first: the number of this run's first micro-batch, which is micro-batch 0 of the order. Several runs of the
            order make a call of more micro-batches.
        loss_scale: the factor of all gradients.
    """

    table: CrossingTable
    stages: Mapping[int, StageRun]
    messages: StageMessages
    inputs: Inputs
    weights: Sequence[float]
    take: Take
    graphs: GraphedPasses | None = None
    first: int = 0
    loss_scale: float = 1.0
    _inputs_left: dict[int, dict[int, Sequence[torch.Tensor]]] = field(default_factory=dict)

    def begin(self) -> None:
        """Get the inputs of the first micro-batch, and begin messages between stages.

        Getting inputs also waits until ranks agree on the call.
        """
        self._inputs_left[0] = self.inputs(self.first)
        self.messages.begin(self.table, self.weights[self.first :])

    def end(self) -> None:
        """Wait until all messages are sent, and free the values that were computed once for all micro-batches."""
        self.messages.end()
        for stage in self.stages.values():
            stage.hoisted = None

    def can_run(self, task: StageTask) -> bool:
        """Whether a task can run now: no stage of this process still has to make a value for it.

        Values of other processes are waited for when the task runs.
        """
        if task.work.is_transfer or task.work is Work.BACKWARD_WEIGHT or self._is_skipped(task):
            return True
        return self.messages.has_all(task.stage, task.micro_batch, is_forward=task.work is Work.FORWARD)

    def run_task(self, task: StageTask) -> None:
        """Run a forward, a backward or half a backward, or begin to receive the values that one of them reads."""
        match task.work:
            case Work.FORWARD:
                self._run_forward(self.stages[task.stage], task.micro_batch)
            case Work.BACKWARD | Work.BACKWARD_INPUT | Work.BACKWARD_WEIGHT if self._is_skipped(task):
                self.stages[task.stage].saved.pop(task.micro_batch, None)
            case Work.BACKWARD:
                self._run_backward(self.stages[task.stage], task.micro_batch)
            case Work.BACKWARD_INPUT:
                self._run_first_half(self.stages[task.stage], task.micro_batch)
            case Work.BACKWARD_WEIGHT:
                stage = self.stages[task.stage]
                stage.run_second_half(stage.for_second_half.pop(task.micro_batch))
            case Work.RECEIVE_FORWARD | Work.RECEIVE_BACKWARD:
                self.messages.expect(task.stage, task.micro_batch, is_forward=task.work is Work.RECEIVE_FORWARD)

    def _is_skipped(self, task: StageTask) -> bool:
        """Whether a task belongs to the backward of a micro-batch of weight zero, which does not run.

        Its gradient may be 0 / 0.
        """
        return task.work is not Work.FORWARD and not self.weights[self.first + task.micro_batch]

    def _run_forward(self, stage: StageRun, micro_batch: int) -> None:
        program = stage.program
        values = program.read_inputs(self._inputs_of(stage, micro_batch))
        if stage.hoisted is None:
            stage.hoisted = self._run_hoisted(program, program.for_hoisted(values))
        for place, slot in program.crossing_inputs:
            values.insert(place, self._received(slot, stage, micro_batch, is_forward=True))
        values += stage.hoisted
        if self.graphs is None or not self.weights[self.first + micro_batch]:
            results, stage.saved[micro_batch] = program.run_forward_on(values)
        else:
            results, stage.graph_gradients[micro_batch] = self._run_both(self.graphs, stage, values, micro_batch)
        self._send(stage, micro_batch, program.outputs, results, is_forward=True)
        self.take(program, results, self.first + micro_batch)

    def _inputs_of(self, stage: StageRun, micro_batch: int) -> Sequence[torch.Tensor]:
        """Return a stage's inputs for a micro-batch.

        When the first stage asks, the inputs of all stages are fetched, so that random numbers are drawn in order.
        """
        if micro_batch not in self._inputs_left:
            self._inputs_left[micro_batch] = self.inputs(self.first + micro_batch)
        return self._inputs_left[micro_batch].pop(stage.number)

    def _run_hoisted(self, program: Executable, values: list[LocalValue]) -> list[LocalValue]:
        return program.run_hoisted_on(values) if self.graphs is None else self.graphs.run_hoisted(program, values)

    def _run_both(
        self, graphs: GraphedPasses, stage: StageRun, values: Sequence[LocalValue], micro_batch: int
    ) -> tuple[list[LocalValue], list[LocalValue]]:
        """Run forward and backward of a micro-batch as a CUDA graph; return local outputs, and local gradients.

        Results that the next call would overwrite are copied.
        """
        results, gradients = graphs.run(stage.program, values, self._tangents(stage, micro_batch))
        if len(self.weights) > 1:
            gradients = [gradient.clone() for gradient in gradients]
        return [result.clone() for result in results], gradients

    def _run_backward(self, stage: StageRun, micro_batch: int) -> None:
        gradients = stage.graph_gradients.pop(micro_batch, None)
        if gradients is None:
            values = stage.saved.pop(micro_batch) + self._tangents(stage, micro_batch)
            sent = stage.run_backward(values)
            self._send(stage, micro_batch, stage.program.gradients, sent, is_forward=False)
        else:
            stage.add(gradients, stage.program.owned_gradients)

    def _run_first_half(self, stage: StageRun, micro_batch: int) -> None:
        values = stage.saved.pop(micro_batch) + self._tangents(stage, micro_batch)
        sent, stage.for_second_half[micro_batch] = stage.program.run_first_half(values)
        self._send(stage, micro_batch, stage.program.gradients, sent, is_forward=False)

    def _tangents(self, stage: StageRun, micro_batch: int) -> list[LocalValue]:
        return [self._tangent(slot, stage, micro_batch) for slot in stage.program.tangents]

    def _tangent(self, slot: LocalSlot, stage: StageRun, micro_batch: int) -> LocalValue:
        """Return the local gradient of an output of a stage.

        It comes from a later stage, or is the micro-batch's scaled weight if the output is the loss, else zero.
        """
        if crosses_stages(slot.slot.name):
            return self._received(slot, stage, micro_batch, is_forward=False)
        is_of_loss = slot.slot.name.replace("tangent:", "output:") in self.table.staged.results
        share = self.weights[self.first + micro_batch] * self.loss_scale if is_of_loss else 0.0
        engine = stage.program.engine
        return engine.read(torch.full(slot.shape, share, dtype=slot.dtype, device=engine.device), slot)

    def _received(self, slot: LocalSlot, stage: StageRun, micro_batch: int, *, is_forward: bool) -> LocalValue:
        with stage.program.engine.ranges.around(RECEIVING):
            value, made = self.messages.take(slot.slot.name, stage.number, micro_batch, is_forward=is_forward)
        return stage.program.engine.reshard(value, made, slot)

    def _send(
        self, stage: StageRun, micro_batch: int, slots: Sequence[LocalSlot], values: Sequence[LocalValue], *,
        is_forward: bool,
    ) -> None:  # fmt: skip
        crossings = self.table.sent.get((stage.number, is_forward), ())
        made = {slot.slot.name: value for slot, value in zip(slots, values, strict=True)} if crossings else {}
        for crossing in crossings:
            self.messages.send(crossing, micro_batch, made[crossing.name])
