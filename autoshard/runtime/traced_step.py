"""Runs the program of a whole training step, micro-batch by micro-batch, then the update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autoshard.errors import NotAvailableError
from autoshard.ir.loss import Output, loss_among, no_loss
from autoshard.ir.loss_weights import ReadInput
from autoshard.ir.lowered import LocalSlot
from autoshard.ir.pipeline_order import PipelineOrder, StageTask, Work
from autoshard.ir.plan import Plan
from autoshard.ir.program import InputKind, OutputKind
from autoshard.ir.request import CompiledProgram
from autoshard.ir.spec import Reduction
from autoshard.runtime.engine import LocalValue
from autoshard.runtime.executable import Executable
from autoshard.runtime.graphed_passes import GraphedPasses
from autoshard.runtime.members import Members
from autoshard.runtime.sharded_module import ShardedModule
from autoshard.runtime.signature import FlatCall
from autoshard.runtime.traced_optimizer import TracedState

Part = tuple[Sequence[Any], Mapping[str, Any]]
"""Positional and keyword arguments of a micro-batch."""

Find = Callable[[Sequence[Any], Mapping[str, Any]], tuple[Executable, FlatCall]]
"""The program of a step for a micro-batch, and the call as it flattens it."""


@dataclass(slots=True)
class _Running:
    """A step that runs: shares of the loss, what micro-batches keep for their backward, and gradients so far.

    Args:
        executable: the program of all micro-batches.
        calls: of each micro-batch.
        weights: the count of each micro-batch in the loss.
        gradients: of micro-batches whose backward ran with their forward.
        is_summed: `carried` are sums of several micro-batches' gradients, no more results of a backward.
        held: what is computed once for all micro-batches, from the first forward to the last backward.
    """

    executable: Executable
    calls: Sequence[FlatCall]
    weights: Sequence[float]
    losses: list[torch.Tensor] = field(default_factory=list)
    saved: dict[int, list[LocalValue]] = field(default_factory=dict)
    gradients: dict[int, list[LocalValue]] = field(default_factory=dict)
    carried: list[LocalValue] | None = None
    is_summed: bool = False
    held: list[LocalValue] | None = None


class TracedStep:
    """Forward, backward and update of `sharded` by `optimizer`, as one program.

    Args:
        sharded: the model.
        optimizer: one that is traced (see `traced_optimizer`), over its parameters.
        max_grad_norm: gradients are scaled down to this norm over all parameters, or None.
        order: of its micro-batches.
        graphs: launches forward and backward of a micro-batch from a CUDA graph; None to launch each kernel.
    """

    def __init__(
        self,
        sharded: ShardedModule,
        optimizer: torch.optim.Optimizer,
        max_grad_norm: float | None,
        order: PipelineOrder,
        graphs: GraphedPasses | None = None,
    ) -> None:
        self._sharded = sharded
        self._order = order
        self._graphs = graphs
        self._state = TracedState(optimizer, sharded.engine, max_grad_norm)

    def clip_to(self, max_grad_norm: float | None) -> None:
        """Clip gradients to this norm from the next step on."""
        self._state.max_grad_norm = max_grad_norm

    def compile_for(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Plan | None:
        """Compile the program for a call now; returns its plan."""
        members = self._sharded.members()
        executable, _ = self._sharded.find_step(args, kwargs, self._state.update(members), members, runs=False)
        return executable.compiled.plan

    @torch.no_grad()
    def run(self, parts: Sequence[Part], members: Members) -> torch.Tensor:
        """One step on micro-batches, with the model's members as they are now; the sum of their shares of the loss."""
        find = partial(self._sharded.find_step, update=self._state.update(members), members=members)
        executable, calls = common_program(self._sharded, parts, find)
        if len(parts) > 1:
            _check_sums(executable)
        running = _Running(executable, calls, self._weights(parts, executable))
        for task in self._order.tasks(0):
            if task.work is Work.FORWARD:
                self._run_forward_of(task, running)
            else:
                self._run_backward_of(task, running)
        self._run_update(running)
        losses = running.losses
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _weights(self, parts: Sequence[Part], executable: Executable) -> list[float]:
        """What each micro-batch counts in the loss."""
        if len(parts) == 1:
            return [1.0]
        return weights_of(self._sharded, executable.compiled, parts)

    def _run_forward_of(self, task: StageTask, running: _Running) -> None:
        """Keep a micro-batch's share of the loss, and what its backward needs."""
        executable, call = running.executable, running.calls[task.micro_batch]
        weight = running.weights[task.micro_batch]
        if self._graphs is None or not weight:
            loss, running.saved[task.micro_batch] = self._run_forward(executable, call, running)
        else:
            loss, gradients = self._run_both(self._graphs, executable, call, running, weight)
            running.gradients[task.micro_batch] = (
                [item.clone() for item in gradients] if len(running.calls) > 1 else gradients
            )
        running.losses.append(loss * weight if weight else torch.zeros_like(loss))

    def _run_backward_of(self, task: StageTask, running: _Running) -> None:
        """Add a micro-batch's gradients to what is carried into the update."""
        executable = running.executable
        gradients = running.gradients.pop(task.micro_batch, None)
        if gradients is None:
            saved, weight = running.saved.pop(task.micro_batch), running.weights[task.micro_batch]
            if not weight:  # nothing counts in it: its gradient may be zero over zero
                return
            gradients = executable.run_to_gradients(saved, self._tangents(executable, weight))
        if running.carried is None:
            running.carried = gradients
            return
        self._sharded.engine.add(running.carried, gradients, None if running.is_summed else executable.owned_gradients)
        running.is_summed = True

    def _run_update(self, running: _Running) -> None:
        """Parameters and state become what the update makes of the gradients of all micro-batches."""
        executable, carried, running.held = running.executable, running.carried, None
        if executable.phased.update is not None and carried is not None:
            held = self._state.hold(executable)
            executable.run_update(carried, held)
            self._state.keep(executable, held)
        self._state.optimizer.step()  # no parameter has a gradient, so it only tells its schedulers

    def _run_forward(
        self, executable: Executable, call: FlatCall, running: _Running
    ) -> tuple[torch.Tensor, list[LocalValue]]:
        """The loss, and what is kept for the backward."""
        tensors = self._sharded.gather_inputs(executable, call)
        if running.held is None:
            running.held = executable.run_hoisted(tensors)
        results, saved = executable.run_forward_locally(tensors, running.held)
        return self._hand_out(executable, results), saved

    def _run_both(
        self, graphs: GraphedPasses, executable: Executable, call: FlatCall, running: _Running, weight: float
    ) -> tuple[torch.Tensor, list[LocalValue]]:
        """As `_run_forward`, with what the backward carries into the update; results are valid until the next call."""
        tensors = self._sharded.gather_inputs(executable, call)
        if running.held is None:
            running.held = graphs.run_hoisted(executable, executable.read_for_hoisted(tensors))
        values = [*executable.read_inputs(tensors), *running.held]
        tangents = executable.read_tangents(self._tangents(executable, weight))
        results, gradients = graphs.run(executable, values, tangents)
        return self._hand_out(executable, [result.clone() for result in results]), gradients

    def _tangents(self, executable: Executable, weight: float) -> dict[str, torch.Tensor]:
        """The gradient of the loss of a micro-batch that counts so much."""
        loss = loss_of(executable)
        share = torch.full((), weight, dtype=loss.dtype, device=self._sharded.engine.device)
        return {loss.slot.name.replace("output:", "tangent:"): share}

    def _hand_out(self, executable: Executable, results: Sequence[LocalValue]) -> torch.Tensor:
        """The loss, of the results of a forward; buffers are updated, other outputs are not put together."""
        outputs = dict(zip((slot.slot.name for slot in executable.outputs), results, strict=True))
        for slot in executable.outputs:
            if slot.slot.kind == OutputKind.BUFFER_UPDATE:
                self._sharded.results.update_buffer(
                    slot.slot.name, executable.write_output(outputs[slot.slot.name], slot)
                )
        executable.set_attributes()
        for index, path in executable.phased.lowered.traced.kept.items():
            name = f"output:{index}"
            kept = next(slot for slot in executable.outputs if slot.slot.name == name)
            self._sharded.results.keep(path, executable.write_output(outputs[name], kept))
        slot = loss_of(executable)
        return executable.write_output(outputs[slot.slot.name], slot)


def weights_of(sharded: ShardedModule, compiled: CompiledProgram, parts: Sequence[Part]) -> list[float]:
    """What each micro-batch counts in the loss; `NotAvailableError` where the loss is not made of theirs."""
    if compiled.weights is None:
        raise no_loss([tuple(slot.shape) for slot in compiled.phased.lowered.outputs])
    return compiled.weights.of_parts(len(parts), reader_of(sharded, parts))


def reader_of(sharded: ShardedModule, parts: Sequence[Part]) -> ReadInput:
    """Reads inputs of micro-batches, and buffers, whole."""
    calls = [FlatCall.of(*part).tensors for part in parts]

    def read(part: int, kind: str, name: str) -> torch.Tensor:
        value = calls[part][name] if kind == InputKind.INPUT else sharded.get_buffer(name)
        return value.full_tensor() if isinstance(value, DTensor) else value

    return read


def loss_of(executable: Executable) -> LocalSlot:
    """The output that is the loss: that which `find_loss` finds; `TraceError` where nothing can be trained by it."""
    kept = {f"output:{index}" for index in executable.phased.lowered.traced.kept}
    slots = {slot.slot.name: slot for slot in executable.outputs if slot.slot.kind == OutputKind.OUTPUT}
    slots = {name: slot for name, slot in slots.items() if name not in kept}
    outputs = [Output(name, tuple(slot.shape), slot.dtype) for name, slot in slots.items()]
    return slots[loss_among(outputs, {slot.slot.name for slot in executable.tangents}).name]


def common_program(sharded: ShardedModule, parts: Sequence[Part], find: Find) -> tuple[Executable, Sequence[FlatCall]]:
    """The program of all micro-batches, and their calls, each looked up once.

    Where micro-batches branch differently, the program is the one that branches as the whole batch does.

    Raises:
        NotAvailableError: no part branches as the batch does, or that cannot be told.
    """
    executables, calls = zip(*(find(*part) for part in parts), strict=True)
    found = dict.fromkeys(executables)
    first = executables[0]
    if len(parts) == 1 or not first.phased.lowered.traced.guards:
        return first, calls
    read = reader_of(sharded, parts)
    for executable in found:
        weights = executable.compiled.weights
        branches = None if weights is None else weights.branches
        is_alike = len(found) == 1 if branches is None else branches.are_of_batch(len(parts), read)
        if is_alike:
            return executable, calls
    raise NotAvailableError(
        f"micro_batches={len(parts)}: the model branches on the values of its inputs, and no part of this batch is "
        "known to branch as the whole batch does. Compute without the branch (torch.where), or leave micro_batches, "
        "and the axis 'pipeline' of the mesh, out for this model."
    )


def _check_sums(executable: Executable) -> None:
    """Gradients of micro-batches add up where they are sums or addends of sums, not maxima."""
    lowered = executable.phased.lowered
    nodes = {node.name: node for node in lowered.graph_module.graph.nodes}
    for name in executable.phased.carried:
        spec = nodes[name].meta["spec"]
        pending = (reduction for axis, reduction in spec.partial if lowered.mesh.axis_size(axis) > 1)
        if any(reduction is not Reduction.SUM for reduction in pending):
            raise NotAvailableError(
                f"micro_batches: the plan leaves gradient {name!r} as {spec!r}, and what awaits another reduction than "
                "a sum does not add up. Plan again (leave plan= out), or leave micro_batches out."
            )
