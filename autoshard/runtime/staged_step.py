"""Runs a training step whose program is cut into the stages of a pipeline, in the order that was proven.

Where one process simulates all ranks it runs all stages, taking turns as pipeline ranks would; with processes, each
runs the stages of its rank. Values that cross stages go by way of `StageMessages`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autoshard.errors import NotAvailableError
from autoshard.ir.lowered import LocalSlot
from autoshard.ir.pipeline_order import Slot, StageTask, Work
from autoshard.ir.plan import Plan
from autoshard.ir.program import InputKind
from autoshard.ir.staged import Crossing, StagedProgram
from autoshard.ir.step_order import one_after_another
from autoshard.runtime.engine import Loaded, LocalValue
from autoshard.runtime.executable import Executable
from autoshard.runtime.members import Members
from autoshard.runtime.owned_results import owned_results
from autoshard.runtime.sharded_module import ShardedModule
from autoshard.runtime.stage_messages import StageMessages
from autoshard.runtime.stage_update import StageUpdate
from autoshard.runtime.traced_optimizer import TracedState
from autoshard.runtime.traced_step import Part, weights_of

Given = Mapping[tuple[InputKind, str], torch.Tensor]
"""What the micro-batch's call passes, and the model's own tensors, by kind and name."""


@dataclass(slots=True)
class _Stage:
    """A stage that this process runs.

    Args:
        number: its place in the pipeline.
        program: what it runs.
        state: the optimizer's, of its parameters.
        update: its update.
        sends: what its forward, and what its backward makes for other stages.
        held: what is computed once for all micro-batches.
        saved: what micro-batches keep for their backward.
        halves: its backward in two, where the order cuts it.
        kept: what first halves keep for the second, by micro-batch.
        carried: the gradients so far.
        owned: which of them may be written over; None: all.
    """

    number: int
    program: Executable
    state: TracedState
    update: StageUpdate
    sends: Mapping[bool, Sequence[Crossing]]
    halves: _Halves | None = None
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
class _Halves:
    """The halves of a backward, ready to run; `owned`: which results of the second may be written over."""

    inputs: Loaded
    weights: Loaded
    owned: Sequence[bool]


class StagedStep:
    """Forward, backward and update of `sharded` by `optimizer`, stage by stage; as `TracedStep`.

    Args:
        sharded: the model; its compiler cuts training steps into stages.
        optimizer: one that is traced, over its parameters.
        max_grad_norm: gradients are scaled down to this norm over all parameters of all stages, or None.
        micro_batches: of a step.
        messages: between the stages.
    """

    def __init__(
        self,
        sharded: ShardedModule,
        optimizer: torch.optim.Optimizer,
        max_grad_norm: float | None,
        micro_batches: int,
        messages: StageMessages,
    ) -> None:
        self._sharded = sharded
        self._optimizer = optimizer
        self._max_grad_norm = max_grad_norm
        self._order = one_after_another(micro_batches)
        self._messages = messages
        self._state = TracedState(optimizer, sharded.engine, max_grad_norm)
        self._loaded: dict[int, tuple[Executable, list[_Stage]]] = {}
        sharded.agreement.watches_members = messages.rank is None

    def compile_for(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Plan | None:
        """Compile the stages for a call now; returns the first one's plan."""
        members = self._sharded.members()
        executable, _ = self._sharded.find_step(args, kwargs, self._state.update(members), members, runs=False)
        self._stages_of(executable)
        return executable.compiled.plan

    @torch.no_grad()
    def run(self, parts: Sequence[Part], members: Members) -> torch.Tensor:
        """One step on micro-batches, with the model's members as they are now; the sum of their shares of the loss."""
        update = self._state.update(members)
        executable, _ = self._sharded.find_step(*parts[0], update, members)
        stages = self._stages_of(executable)
        whole = len(parts) == 1
        weights = [1.0] if whole else weights_of(self._sharded, executable.compiled, parts, self._order)
        given = [self._given(executable, part, members, update) for part in parts]
        staged = executable.compiled.staged
        assert staged is not None, "the program is cut into stages"
        run = _Run(staged, {stage.number: stage for stage in stages}, self._messages, given, weights)
        run.run()
        self._update(stages, members, staged, counts=any(weights))
        return self._messages.share_loss(run.loss(), staged)

    def _given(self, executable: Executable, part: Part, members: Members, update: Any) -> Given:
        found, call = self._sharded.find_step(*part, update, members)
        if found is not executable:
            raise NotAvailableError(
                "micro_batches: two parts of one batch need different programs, because the model branches on the "
                "values of its inputs. Use a mesh without the axis 'pipeline', and leave micro_batches out."
            )
        tensors = self._sharded.gather_inputs(executable, call)
        executable.set_attributes()
        return dict(zip(executable.input_names, tensors, strict=True))

    def _update(self, stages: Sequence[_Stage], members: Members, staged: StagedProgram, *, counts: bool) -> None:
        """Parameters and state of all stages become what their updates make of the gradients, if any `counts`."""
        work = []
        for stage in stages:
            stage.state.update(members)
            held = stage.state.hold(stage.program) if stage.program.phased.update is not None else []
            squares, kept = stage.update.run_squares(stage.carried, held) if stage.carried is not None else (None, [])
            work.append((stage, held, squares, kept))
        total = None
        if self._max_grad_norm is not None:
            total = self._messages.sum_over_stages(
                {stage.number: squares for stage, _, squares, _ in work}, len(staged.stages)
            )
        for stage, held, _, kept in work:
            if stage.carried is not None and stage.program.phased.update is not None:
                stage.update.run(stage.carried, kept, held, total)
                stage.state.keep(stage.program, held)
        for stage in stages:
            stage.held, stage.carried = None, None
        if counts:
            own = {stage.number for stage in stages}
            self._state.keep_elsewhere([item.phased.lowered for n, item in enumerate(staged.stages) if n not in own])
        self._optimizer.step()  # no parameter has a gradient, so it only tells its schedulers

    def _stages_of(self, executable: Executable) -> list[_Stage]:
        """The stages that this process runs, loaded once, by all ranks in one order."""
        if id(executable) not in self._loaded:
            staged = executable.compiled.staged
            assert staged is not None, "the program is cut into stages"
            self._messages.connect(staged)
            made = [self._load(number, stage, staged) for number, stage in executable.stages.items()]
            self._loaded[id(executable)] = executable, made
        return self._loaded[id(executable)][1]

    def _load(self, number: int, program: Executable, staged: StagedProgram) -> _Stage:
        program.load_both_ways()
        update = StageUpdate(program)
        update.load()
        sends = {
            way: [item for item in staged.crossings if item.maker == number and item.is_forward == way]
            for way in (True, False)
        }
        engine, cut = self._sharded.engine, staged.stages[number].halves
        halves = cut and _Halves(engine.load(cut.inputs), engine.load(cut.weights), owned_results(cut.weights.graph))
        state = TracedState(self._optimizer, engine, self._max_grad_norm)
        return _Stage(number, program, state, update, sends, halves)


@dataclass(slots=True)
class _Run:
    """Forwards and backwards of a step.

    Args:
        staged: the program.
        stages: those that run here, by number.
        messages: between stages.
        given: for each micro-batch, what its call passes.
        weights: what each micro-batch counts in the loss.
    """

    staged: StagedProgram
    stages: Mapping[int, _Stage]
    messages: StageMessages
    given: Sequence[Given]
    weights: Sequence[float]
    losses: dict[int, torch.Tensor] = field(default_factory=dict)

    def run(self) -> None:
        """Run the order of each rank of the pipeline that runs here; several take turns."""
        self.messages.begin(self.staged, self.weights)
        ranks = sorted({self.staged.order.stage_ranks[number] for number in self.stages})
        left = {rank: list(reversed(self.staged.order.ranks[rank])) for rank in ranks}
        while any(left.values()):
            turns = [self._run_next(slots) for slots in left.values() if slots]
            assert any(turns), "the order was proven to end"
        self.messages.end()

    def loss(self) -> torch.Tensor | None:
        """The sum of the micro-batches' shares, where this process runs the last stage."""
        if self.staged.loss_stage not in self.stages:
            return None
        shares = [self._share(number) for number in range(len(self.given))]
        return shares[0] if len(shares) == 1 else torch.stack(shares).sum()

    def _share(self, micro_batch: int) -> torch.Tensor:
        loss, weight = self.losses[micro_batch], self.weights[micro_batch]
        return loss * weight if weight else torch.zeros_like(loss)

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

    def _run_forward(self, stage: _Stage, micro_batch: int) -> None:
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
            if slot.slot.name == self.staged.loss:
                self.losses[micro_batch] = program.engine.write(value, slot).clone()  # it may view what is far larger

    def _run_backward(self, stage: _Stage, micro_batch: int) -> None:
        values = self._taken(stage, micro_batch)
        if values is not None:
            sent, carried = stage.program.run_backward_on(values)
            self._send(stage, micro_batch, stage.program.gradients, sent, is_forward=False)
            stage.add(carried, stage.program.owned_gradients)

    def _run_first_half(self, stage: _Stage, micro_batch: int) -> None:
        values = self._taken(stage, micro_batch)
        if values is not None:
            assert stage.halves is not None, "the order cuts backwards"
            results, count = list(stage.halves.inputs(values)), len(stage.program.gradients)
            self._send(stage, micro_batch, stage.program.gradients, results[:count], is_forward=False)
            stage.kept[micro_batch] = results[count:]

    def _run_second_half(self, stage: _Stage, micro_batch: int) -> None:
        if self.weights[micro_batch]:
            assert stage.halves is not None, "the order cuts backwards"
            stage.add(list(stage.halves.weights(stage.kept.pop(micro_batch))), stage.halves.owned)

    def _taken(self, stage: _Stage, micro_batch: int) -> list[LocalValue] | None:
        """Values that a backward takes, perhaps none; None where its micro-batch has no weight, and it does not run."""
        saved, weight = stage.saved.pop(micro_batch), self.weights[micro_batch]
        if not weight:
            return None
        return saved + [self._tangent(slot, stage, micro_batch, weight) for slot in stage.program.tangents]

    def _tangent(self, slot: LocalSlot, stage: _Stage, micro_batch: int, weight: float) -> LocalValue:
        """What a backward takes: the micro-batch's share as the gradient of its loss, or what a later stage sent."""
        if slot.slot.name == self.staged.loss.replace("output:", "tangent:"):
            engine = stage.program.engine
            return engine.read(torch.full((), weight, dtype=slot.dtype, device=engine.device), slot)
        return self._received(slot, stage, micro_batch, is_forward=False)

    def _received(self, slot: LocalSlot, stage: _Stage, micro_batch: int, *, is_forward: bool) -> LocalValue:
        value, made = self.messages.take(slot.slot.name, stage.number, micro_batch, is_forward=is_forward)
        return stage.program.engine.reshard(value, made, slot)

    def _send(
        self, stage: _Stage, micro_batch: int, slots: Sequence[LocalSlot], values: Sequence[LocalValue], *,
        is_forward: bool,
    ) -> None:  # fmt: skip
        made = {slot.slot.name: value for slot, value in zip(slots, values, strict=True)}
        for crossing in stage.sends[is_forward]:
            self.messages.send(crossing, micro_batch, made[crossing.name])
