"""One node of torch's autograd graph per call of a compiled program.

The forward of the node runs the program's forward phase and keeps what the backward phase needs, as torch
keeps tensors of any operator: an in-place change between the two is noticed, and memory is freed while the backward
runs, each value after its last use.

A program has tangents for the outputs that its trace took to be the loss. A backward that reaches another
output runs the whole of a second program, with a tangent for each output, from the inputs that the node
keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from autoshard.errors import TraceError
from autoshard.ir.program import OutputKind
from autoshard.runtime.engine import LocalValue
from autoshard.runtime.executable import Executable


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a program.

    Args:
        executable: the program.
        all_tangents: gives the program that has a tangent for each output; compiled when first asked for.
    """

    executable: Executable
    all_tangents: Callable[[], Executable]


class ProgramFunction(torch.autograd.Function):
    """`apply(call, *tensors)`: tensors by the program's input slots, to tensors by its output slots."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the forward phase; see `torch.autograd.Function`."""
        outputs, saved = call.executable.run_forward(tensors)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.tensors = tensors
        ctx.versions = tuple(tensor._version for tensor in tensors)
        ctx.layout = _save(ctx, saved)
        slots = call.executable.outputs
        outputs = _distinct(outputs)
        ctx.mark_non_differentiable(
            *(
                output
                for output, slot in zip(outputs, slots, strict=True)
                if slot.slot.kind != OutputKind.OUTPUT or not output.dtype.is_floating_point
            )
        )
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Run the backward phase; see `torch.autograd.Function`."""
        call, executable = ctx.call, ctx.call.executable
        tangents = _tangents(executable, grads)
        covered = {slot.slot.name for slot in executable.tangents}
        if tangents.keys() <= covered:
            saved = _saved(ctx)
            ctx.maybe_clear_saved_tensors()  # they live in `saved` now, unless the user retains the graph
            gradients = executable.run_backward(saved, tangents, _wanted(ctx))
        else:
            gradients = _run_whole(ctx, call.all_tangents(), tangents)
        wanted = zip(executable.inputs, ctx.needs_input_grad[1:], strict=True)
        return (None, *(gradients.get(slot.slot.name) if needed else None for slot, needed in wanted))


def _wanted(ctx: Any) -> dict[str, torch.Tensor]:
    """The inputs whose gradients autograd asks for, by name."""
    inputs = zip(ctx.call.executable.inputs, ctx.tensors, ctx.needs_input_grad[1:], strict=True)
    return {slot.slot.name: tensor for slot, tensor, needed in inputs if needed}


def _tangents(executable: Executable, grads: Sequence[torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """Gradients of outputs by the name of the tangent: that of "output:3" is "tangent:3"."""
    return {
        slot.slot.name.replace("output:", "tangent:"): grad
        for slot, grad in zip(executable.outputs, grads, strict=True)
        if grad is not None and slot.slot.kind == OutputKind.OUTPUT
    }


def _run_whole(ctx: Any, executable: Executable, tangents: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients from the kept inputs, through a program with more tangents than the one that ran."""
    slots = ctx.call.executable.inputs
    for tensor, version, slot in zip(ctx.tensors, ctx.versions, slots, strict=True):
        if tensor._version != version:
            raise TraceError(
                f"{slot.slot.kind.value} {slot.slot.name!r} was changed in place between forward and backward "
                f"(version {version}, now {tensor._version}), and the gradient of an output other than the loss "
                "needs its old value. Call backward before changing it, or clone it."
            )
    by_name = {(slot.slot.kind, slot.slot.name): tensor for slot, tensor in zip(slots, ctx.tensors, strict=True)}
    tensors = [by_name[slot.slot.kind, slot.slot.name] for slot in executable.inputs]
    _, saved = executable.run_forward(tensors)
    return executable.run_backward(saved, tangents, _wanted(ctx))


def _distinct(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs, with a tensor object of its own for each: autograd tells results apart by identity."""
    seen: set[int] = set()
    result = []
    for output in outputs:
        result.append(output.clone() if id(output) in seen else output)
        seen.add(id(output))
    return result


def _save(ctx: Any, saved: Sequence[LocalValue]) -> tuple[Any, ...]:
    """Hand all tensors of `saved` to autograd; returns what `_saved` needs to put them together again.

    A local value is a tensor, a list of tensors, or a number of the program (a rank's offset).
    """
    tensors: list[torch.Tensor] = []
    layout: list[Any] = []
    for value in saved:
        if isinstance(value, list) and all(isinstance(item, torch.Tensor) for item in value):
            layout.append(("list", len(value)))
            tensors.extend(value)
        elif isinstance(value, torch.Tensor):
            layout.append(("tensor", 1))
            tensors.append(value)
        else:
            layout.append(("constant", value))
    ctx.save_for_backward(*tensors)
    return tuple(layout)


def _saved(ctx: Any) -> list[LocalValue]:
    """The local values that `_save` kept."""
    tensors = iter(ctx.saved_tensors)
    result: list[LocalValue] = []
    for kind, content in ctx.layout:
        if kind == "constant":
            result.append(content)
        elif kind == "tensor":
            result.append(next(tensors))
        else:
            result.append([next(tensors) for _ in range(content)])
    return result
