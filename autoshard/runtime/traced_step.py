"""Runs the program of a whole training step, micro-batch by micro-batch, then the update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autoshard.errors import NotAvailableError, TraceError
from autoshard.ir.lowered import LocalSlot
from autoshard.ir.plan import Plan
from autoshard.ir.program import OutputKind
from autoshard.ir.spec import Reduction
from autoshard.ir.update import Update
from autoshard.runtime.engine import LocalValue
from autoshard.runtime.executable import Executable
from autoshard.runtime.sharded_module import ShardedModule
from autoshard.runtime.signature import FlatCall
from autoshard.runtime.traced_optimizer import TracedState, describe_update, names_of

Part = tuple[Sequence[Any], Mapping[str, Any]]
"""Positional and keyword arguments of a micro-batch."""


class TracedStep:
    """Forward, backward and update of `sharded` by `optimizer`, as one program.

    Args:
        sharded: the model.
        optimizer: one that is traced (see `traced_optimizer`), over its parameters.
        max_grad_norm: gradients are scaled down to this norm over all parameters, or None.
    """

    def __init__(self, sharded: ShardedModule, optimizer: torch.optim.Optimizer, max_grad_norm: float | None) -> None:
        self._sharded = sharded
        self._state = TracedState(optimizer, dict(sharded.named_parameters()), sharded.engine)
        self._max_grad_norm = max_grad_norm

    def compile_for(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Plan | None:
        """Compile the program for a call now; returns its plan."""
        executable, _ = self._sharded.find_step(args, kwargs, self._update())
        return executable.compiled.plan

    @torch.no_grad()
    def run(self, parts: Sequence[Part]) -> torch.Tensor:
        """One step on micro-batches of equal weight; the sum of their shares of the loss."""
        update = self._update()
        executable: Executable | None = None
        carried: list[LocalValue] = []
        losses = []
        for part in parts:
            found, loss, gradients = self._run_part(part, update, len(parts))
            losses.append(loss)
            if executable is None:
                executable, carried = found, gradients
            else:
                _check_alike(executable, found)
                carried = [self._sharded.engine.add(carried.pop(0), gradients.pop(0)) for _ in range(len(carried))]
        assert executable is not None, "a batch has at least one part"
        if executable.phased.update is not None:
            held = self._state.hold(executable)
            executable.run_update(carried, held)
            self._state.keep(executable, held)
        self._state.optimizer.zero_grad(set_to_none=True)
        self._state.optimizer.step()  # without gradients it only tells its schedulers and hooks
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _update(self) -> Update:
        names = names_of(self._sharded.named_parameters())
        return describe_update(self._state.optimizer, names, self._max_grad_norm)

    def _run_part(self, part: Part, update: Update, count: int) -> tuple[Executable, torch.Tensor, list[LocalValue]]:
        """The program of a micro-batch, its share of the loss, and its gradients."""
        executable, call = self._sharded.find_step(*part, update)
        if count > 1:
            _check_sums(executable)
        loss, saved = self._run_forward(executable, call)
        share = torch.full((), 1 / count, dtype=loss.dtype, device=self._sharded.engine.device)
        tangent = loss_of(executable).slot.name.replace("output:", "tangent:")
        carried = executable.run_to_gradients(saved, {tangent: share})
        return executable, loss if count == 1 else loss / count, carried

    def _run_forward(self, executable: Executable, call: FlatCall) -> tuple[torch.Tensor, list[LocalValue]]:
        """The loss, and what is kept for the backward; buffers are updated, other outputs are not put together."""
        results, saved = executable.run_forward_locally(self._sharded.gather_inputs(executable, call))
        outputs = dict(zip((slot.slot.name for slot in executable.outputs), results, strict=True))
        for slot in executable.outputs:
            if slot.slot.kind == OutputKind.BUFFER_UPDATE:
                self._sharded.update_buffer(slot.slot.name, executable.write_output(outputs[slot.slot.name], slot))
        slot = loss_of(executable)
        return executable.write_output(outputs[slot.slot.name], slot), saved


def find_loss(outputs: Any) -> torch.Tensor:
    """The first floating scalar among a model's outputs; `TraceError` where there is none."""
    for leaf in pytree.tree_leaves(outputs):
        if isinstance(leaf, torch.Tensor) and leaf.dim() == 0 and leaf.is_floating_point():
            return leaf
    raise TraceError(_no_loss([tuple(x.shape) for x in pytree.tree_leaves(outputs) if isinstance(x, torch.Tensor)]))


def loss_of(executable: Executable) -> LocalSlot:
    """The output that is the loss: that which `find_loss` finds; `TraceError` where nothing can be trained by it."""
    outputs = [slot for slot in executable.outputs if slot.slot.kind == OutputKind.OUTPUT]
    scalars = [slot for slot in outputs if slot.shape == () and slot.dtype.is_floating_point]
    if not scalars:
        raise TraceError(_no_loss([slot.shape for slot in outputs]))
    loss = min(scalars, key=lambda slot: int(slot.slot.name.removeprefix("output:")))
    if loss.slot.name.replace("output:", "tangent:") not in {slot.slot.name for slot in executable.tangents}:
        raise TraceError(
            "The first floating scalar that the model returns does not depend on any parameter, so there is nothing to "
            "train. Return the loss first, or pass loss_fn=."
        )
    return loss


def _no_loss(shapes: Sequence[tuple[int, ...]]) -> str:
    return (
        f"A training step needs a loss, but the model returns no floating scalar; it returns tensors of "
        f"shapes={shapes}. Return the loss, or pass loss_fn=."
    )


def _check_alike(first: Executable, other: Executable) -> None:
    if first is not other:
        raise NotAvailableError(
            "micro_batches: two parts of one batch need different programs, because the model branches on the values "
            "of its inputs. Leave micro_batches out for this model."
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
