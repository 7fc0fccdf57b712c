"""Runs a training step whose program is cut into the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from autoshard.ir.plan import Plan
from autoshard.ir.staged import StagedProgram
from autoshard.runtime.executable import Executable
from autoshard.runtime.members import Members
from autoshard.runtime.per_program import PerProgram
from autoshard.runtime.sharded_module import ShardedModule
from autoshard.runtime.signature import FlatCall
from autoshard.runtime.stages.crossing_table import CrossingTable
from autoshard.runtime.stages.stage_messages import StageMessages
from autoshard.runtime.stages.stage_update import StageUpdate
from autoshard.runtime.stages.staged_run import Given, Stage, StagedRun, load_stages
from autoshard.runtime.traced_optimizer import TracedState
from autoshard.runtime.traced_step import Part, common_program, weights_of


@dataclass(frozen=True, slots=True)
class _Trained:
    """A stage that this process trains: the stage, its update, and the optimizer's state of its parameters."""

    stage: Stage
    update: StageUpdate
    state: TracedState


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A program ready to run: what its stages hand each other, and the stages that this process trains."""

    table: CrossingTable
    trained: Sequence[_Trained]


class StagedStep:
    """Forward, backward and update of `sharded` by `optimizer`, stage by stage; as `TracedStep`.

    Args:
        sharded: the model; its compiler cuts training steps into stages.
        optimizer: one that is traced, over its parameters.
        max_grad_norm: gradients are scaled down to this norm over all parameters of all stages, or None.
        messages: between the stages.
    """

    def __init__(
        self,
        sharded: ShardedModule,
        optimizer: torch.optim.Optimizer,
        max_grad_norm: float | None,
        messages: StageMessages,
    ) -> None:
        self._sharded = sharded
        self._optimizer = optimizer
        self._max_grad_norm = max_grad_norm
        self._messages = messages
        self._state = TracedState(optimizer, sharded.engine, max_grad_norm)
        self._loaded = PerProgram[_Loaded]()

    def clip_to(self, max_grad_norm: float | None) -> None:
        """Clip gradients to this norm from the next step on."""
        self._max_grad_norm = self._state.max_grad_norm = max_grad_norm

    def compile_for(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Plan | None:
        """Compile the stages for a call now; returns the first one's plan."""
        members = self._sharded.members()
        executable, _ = self._sharded.find_step(args, kwargs, self._state.update(members), members, runs=False)
        self._load(executable)
        return executable.compiled.plan

    @torch.no_grad()
    def run(self, parts: Sequence[Part], members: Members) -> torch.Tensor:
        """One step on micro-batches, with the model's members as they are now; the sum of their shares of the loss."""
        update = self._state.update(members)
        find = partial(self._sharded.find_step, update=update, members=members)
        executable, calls = common_program(self._sharded, parts, find)
        loaded = self._load(executable)
        whole = len(parts) == 1
        weights = [1.0] if whole else weights_of(self._sharded, executable.compiled, parts)
        given = [self._given(executable, call) for call in calls]
        stages = {item.stage.number: item.stage for item in loaded.trained}
        run = StagedRun(
            *(loaded.table, stages, self._messages, given, weights),
            take=lambda slot, value: self._sharded.engine.write(value, slot).clone(),  # it may view what is far larger
        )
        run.run()
        self._update(loaded.trained, members, run.staged, counts=any(weights))
        return self._loss(run)

    def _loss(self, run: StagedRun) -> torch.Tensor:
        """The sum of the micro-batches' shares, on all ranks."""
        ((name, stage),) = run.staged.results.items()
        found = None
        if stage in run.stages:
            pairs = ((run.results[number, name], weight) for number, weight in enumerate(run.weights))
            shares = [loss * weight if weight else torch.zeros_like(loss) for loss, weight in pairs]
            found = shares[0] if len(shares) == 1 else torch.stack(shares).sum()
        return self._messages.share(found, name, run.staged)

    def _given(self, executable: Executable, call: FlatCall) -> Given:
        tensors = self._sharded.gather_inputs(executable, call)
        executable.set_attributes()
        return dict(zip(executable.input_names, tensors, strict=True))

    def _update(self, trained: Sequence[_Trained], members: Members, staged: StagedProgram, *, counts: bool) -> None:
        """Parameters and state of all stages become what their updates make of the gradients, if any `counts`."""
        work = []
        for item in trained:
            stage, program = item.stage, item.stage.program
            item.state.update(members)
            held = item.state.hold(program) if program.phased.update is not None else []
            squares, kept = item.update.run_squares(stage.carried, held) if stage.carried is not None else (None, [])
            work.append((item, held, squares, kept))
        total = None
        if self._max_grad_norm is not None:
            squares_of = {item.stage.number: squares for item, _, squares, _ in work}
            total = self._messages.sum_over_stages(squares_of, len(staged.stages))
        for item, held, _, kept in work:
            if item.stage.carried is not None and item.stage.program.phased.update is not None:
                item.update.run(item.stage.carried, kept, held, total)
                item.state.keep(item.stage.program, held)
        for item in trained:
            item.stage.held, item.stage.carried = None, None
        if counts:
            own = {item.stage.number for item in trained}
            self._state.keep_elsewhere([item.phased.lowered for n, item in enumerate(staged.stages) if n not in own])
        self._optimizer.step()  # no parameter has a gradient, so it only tells its schedulers

    def _load(self, executable: Executable) -> _Loaded:
        """The stages that this process runs, loaded once, by all ranks in one order."""
        return self._loaded.get_or_make(executable, lambda: self._load_anew(executable))

    def _load_anew(self, executable: Executable) -> _Loaded:
        assert executable.compiled.staged is not None, "the program is cut into stages"
        table = self._messages.connect(executable.compiled.staged)
        return _Loaded(table, [*map(self._trained, load_stages(executable))])

    def _trained(self, stage: Stage) -> _Trained:
        update = StageUpdate(stage.program)
        update.load()
        return _Trained(stage, update, TracedState(self._optimizer, self._sharded.engine, self._max_grad_norm))
