"""`TracedStep` runs the program of a whole training step: micro-batch by micro-batch, then the update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from autoshard.ir.pipeline_order import PipelineOrder
from autoshard.ir.plan import Plan
from autoshard.ir.program import OutputKind
from autoshard.runtime.engine import LocalValue
from autoshard.runtime.executable import Executable
from autoshard.runtime.executor import Executor
from autoshard.runtime.graphed_passes import GraphedPasses
from autoshard.runtime.loss_scale import LossScale
from autoshard.runtime.members import Members
from autoshard.runtime.micro_batches import LossWeigher, MicroBatches, common_program, share_of, sum_of
from autoshard.runtime.program_run import ProgramRun
from autoshard.runtime.sharded_module import ShardedModule
from autoshard.runtime.signature import FlatCall
from autoshard.runtime.step_check import StepCheck
from autoshard.runtime.traced_optimizer import TracedState


class TracedStep:
    """Runs training steps of `sharded`, each as one program: forward, backward, and the update of a traced `optimizer`.

    Args:
        sharded: the model.
        optimizer: the optimizer, whose update is part of the program.
        max_grad_norm: gradients are scaled down to this norm over all parameters; None: no clipping.
        order: the order of the tasks of a program without stages.
        executor: runs the tasks.
        weigher: finds the weights of micro-batches in the loss.
        check: may stop a step before its update, and remembers the norm of the gradients.
        graphs: launches forward and backward of a micro-batch as a CUDA graph; None to launch each kernel.
        returns_norm: whether to compute the norm of the gradients even without clipping.
        loss_scale: the scale of the loss; None: the loss is not scaled.
    """

    def __init__(
        self,
        sharded: ShardedModule,
        optimizer: torch.optim.Optimizer,
        max_grad_norm: float | None,
        order: PipelineOrder,
        executor: Executor,
        weigher: LossWeigher,
        check: StepCheck,
        graphs: GraphedPasses | None = None,
        *,
        returns_norm: bool = False,
        loss_scale: LossScale | None = None,
    ) -> None:
        self._sharded = sharded
        self._order = order
        self._weigher = weigher
        self._executor = executor
        self._graphs = graphs
        self._check = check
        self._loss_scale = loss_scale
        self._state = TracedState(
            optimizer, sharded.engine, max_grad_norm, returns_norm=returns_norm, loss_scale=loss_scale
        )

    def clip_to(self, max_grad_norm: float | None) -> None:
        """Set the norm to which gradients are clipped from the next step on; None: no clipping."""
        self._state.max_grad_norm = max_grad_norm

    def compile_for(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Plan | None:
        """Compile the program of a step, given a micro-batch's arguments; return its plan."""
        members = self._sharded.members()
        executable, _ = self._sharded.find_step(args, kwargs, self._state.update(members), members, runs=False)
        self._executor.prepare(executable, self._order)
        return executable.compiled.plan

    @torch.no_grad()
    def run(self, batch: MicroBatches, members: Members) -> torch.Tensor:
        """Run one step on the micro-batches of a batch; return the loss of the whole batch."""
        find = partial(self._sharded.find_step, update=self._state.update(members), members=members)
        executable, calls = common_program(self._weigher, batch, find)
        weights, losses = self._weigher.weights_of(executable.compiled, batch, calls), list[torch.Tensor]()

        def inputs(micro_batch: int) -> dict[int, Sequence[torch.Tensor]]:
            return self._inputs(executable, calls[micro_batch])

        def take(program: Executable, results: Sequence[LocalValue], micro_batch: int) -> None:
            loss = self._hand_out(program, results, loss_name)
            if loss is not None:
                losses.append(share_of(loss, weights[micro_batch]))

        table = self._executor.prepare(executable, self._order)
        (loss_name,) = table.staged.results
        scale = 1.0 if self._loss_scale is None else self._loss_scale.value
        run = self._executor.run(executable, table, inputs, weights, take, self._graphs, scale)
        loss = sum_of(losses) if losses else None
        if any(weights):
            self._update(executable, run, loss)
        self._state.optimizer.step()  # no parameter has a gradient, so the call only informs schedulers
        return run.messages.share(loss, loss_name, table.staged)

    def _inputs(self, executable: Executable, call: FlatCall) -> dict[int, Sequence[torch.Tensor]]:
        tensors = self._sharded.gather_inputs(executable, call)
        executable.set_attributes()
        return executable.by_stage(tensors)

    def _hand_out(self, program: Executable, results: Sequence[LocalValue], loss_name: str) -> torch.Tensor | None:
        """Set buffers and attributes of the model from a stage's results; return the loss, if it is among them."""
        loss, kept = None, program.phased.lowered.traced.kept
        paths = {f"output:{index}": path for index, path in kept.items()}
        for slot, value in zip(program.outputs, results, strict=True):
            if slot.slot.kind == OutputKind.BUFFER_UPDATE:
                self._sharded.results.update_buffer(slot.slot.name, program.write_output(value, slot))
            elif slot.slot.name in paths:
                self._sharded.results.keep(paths[slot.slot.name], program.write_output(value, slot))
            elif slot.slot.name == loss_name:
                loss = program.write_output(value, slot)
        return loss

    def _update(self, executable: Executable, run: ProgramRun, loss: torch.Tensor | None) -> None:
        """Run the updates of this process's stages, on gradients summed over micro-batches.

        Loss and norm are checked first. If the check fails, nothing is updated. `loss` is the loss of the batch; None
        on ranks that do not run the stage of the loss.
        """
        held, table = self._state.hold(executable), run.table
        updates = {n: stage.program.update for n, stage in run.stages.items() if stage.program.update is not None}
        gradients = {number: stage.gradient_sums or [] for number, stage in run.stages.items()}
        first = {number: update.run_norm(gradients[number], held[number]) for number, update in updates.items()}
        norms, total = {number: norm for number, (norm, _) in first.items()}, None
        if table.sums_squares:
            total = run.messages.sum_over_stages(norms, len(table.staged.stages))
        if not self._check.passes(loss, norms.get(0) if total is None else total.sqrt(), executable.digest):
            return
        for number, update in updates.items():
            update.run(first[number][1], held[number], total)
        self._state.keep(executable, held)
