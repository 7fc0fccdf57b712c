"""Make each call of a compiled program one node of torch's autograd graph.

The node's forward runs the program's forward, and saves the tensors that its backward reads, as any operator of torch
does. So torch notices an in-place change of a saved tensor. The backward frees each saved value after its last use.

A tangent is the gradient of an output, which the backward takes as an input. If a model returns losses, its program has
tangents for the losses only. A backward from another output runs a second program, with a tangent for each output, on
the saved inputs. Gradients of gradients (`create_graph=True`) come from a program whose outputs are the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autoshard.ir.derivative import Derivative
from autoshard.ir.program import InputKind, InputSlot, OutputKind, OutputSlot
from autoshard.runtime.engine import LocalValue
from autoshard.runtime.executable import Executable
from autoshard.runtime.versions import check_versions, version_of


@dataclass(frozen=True, slots=True)
class ProgramCall:
    """One call of a program.

    Args:
        executable: the program.
        inputs: the tensors among the call's arguments, by name ("input:0").
        all_tangents: returns the program with a tangent for each output; compiles it the first time.
        differentiate: returns a call that computes this call's gradients from its inputs and tangents.
    """

    executable: Executable
    inputs: Mapping[str, torch.Tensor]
    all_tangents: Callable[[], Executable]
    differentiate: Callable[[Derivative, Sequence[torch.Tensor]], ProgramCall]


def run(call: ProgramCall, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Run the forward of a compiled program, and return its outputs.

    If gradients are enabled, the call becomes a node of autograd's graph, and `backward` runs the program's backward.

    Args:
        tensors: one tensor for each input of the program, in the program's order.
    """
    if torch.is_grad_enabled():
        reached: list[torch.Tensor | None] = list(tensors)
        for place in call.executable.without_gradient:
            reached[place] = None  # or else autograd would call hooks on the input with None
        return ProgramFunction.apply(call, tuple(tensors), *reached)
    return _distinct(call.executable.run_forward(tensors)[0])


class ProgramFunction(torch.autograd.Function):
    """The autograd function of a call: `apply(call, tensors, *reached)` maps the program's inputs to its outputs.

    `reached` has the inputs that may get a gradient, and None in the place of each other input.
    """

    @staticmethod
    def forward(
        ctx: Any, call: ProgramCall, tensors: tuple[torch.Tensor, ...], *reached: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        """Run the forward phase; a method of `torch.autograd.Function`."""
        outputs, saved = call.executable.run_forward(tensors)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.tensors = tensors
        ctx.versions = tuple(map(version_of, tensors))
        ctx.layout = _save(ctx, saved)
        slots = call.executable.outputs
        outputs = _distinct(outputs)
        ctx.mark_non_differentiable(
            *(
                output
                for output, slot in zip(outputs, slots, strict=True)
                if not (_is_returned_with_grad(slot.slot) and _has_gradients(output.dtype))
            )
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Run the backward phase; a method of `torch.autograd.Function`."""
        tangents = _tangents(ctx.call.executable, grads)
        if not tangents:  # no gradient arrives, so none leaves
            return (None,) * len(ctx.needs_input_grad)
        if torch.is_grad_enabled():
            gradients = _differentiable_gradients(ctx, tangents)
        else:
            gradients = _gradients(ctx, tangents)
        wanted = zip(ctx.call.executable.inputs, ctx.needs_input_grad[2:], strict=True)
        return (None, None, *(gradients.get(slot.slot.name) if needed else None for slot, needed in wanted))


def _has_gradients(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


class GradientFunction(torch.autograd.Function):
    """The autograd function of a call's backward, which autograd can differentiate.

    `apply(first, names, *tensors, *tangents)` returns the gradients. `first` is the context of the call's
    `ProgramFunction`, into which the names of the gradients are written. `names` are those of the tangents. `tensors`
    are the program's inputs, in order, with None in the place of each input that needs no gradient.
    """

    @staticmethod
    def forward(ctx: Any, first: Any, names: tuple[str, ...], *tensors: Any) -> tuple[torch.Tensor, ...]:
        """Compute the gradients of the call by its program; a method of `torch.autograd.Function`."""
        ctx.set_materialize_grads(False)
        ctx.first, ctx.names = first, names
        ctx.tangents = tensors[len(tensors) - len(names) :]
        gradients = _gradients(first, dict(zip(names, ctx.tangents, strict=True)))
        ctx.gradient_names = first.gradient_names = tuple(gradients)
        return tuple(_distinct(list(gradients.values())))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Compute gradients of gradients by a program that returns gradients; a method of `torch.autograd.Function`."""
        create_graph, needed = torch.is_grad_enabled(), ctx.needs_input_grad[2:]
        with torch.enable_grad():
            # Views, because a tangent may depend on an input by a path that is not part of this node.
            tensors = [
                tensor.view_as(tensor) if wanted else tensor
                for tensor, wanted in zip((*ctx.first.tensors, *ctx.tangents), needed, strict=True)
            ]
            given = {name: grad for name, grad in zip(ctx.gradient_names, grads, strict=True) if grad is not None}
            recomputed = zip(_recomputed_gradients(ctx, tuple(given), tensors), given.values(), strict=True)
            pairs = [(gradient, _plain(grad)) for gradient, grad in recomputed if gradient.requires_grad]
            found = torch.autograd.grad(
                [gradient for gradient, _ in pairs],
                [tensor for tensor, wanted in zip(tensors, needed, strict=True) if wanted],
                [grad for _, grad in pairs],
                create_graph=create_graph,
                allow_unused=True,
            )
        rest = iter(found)
        return (None, None, *(next(rest) if wanted else None for wanted in needed))


def _recomputed_gradients(ctx: Any, names: tuple[str, ...], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Compute the results of a `GradientFunction` again, by a compiled program that autograd can differentiate.

    Args:
        ctx: the context of the `GradientFunction`.
        names: the gradients to return.
        tensors: the inputs of the first call, then its tangents.
    """
    first, slots = ctx.first, [slot.slot for slot in ctx.first.call.executable.inputs]
    check_versions(slots, first.tensors, first.versions)
    outputs = tuple(int(name.removeprefix("tangent:")) for name in ctx.names)
    derived = first.call.differentiate(Derivative(outputs, names), tensors[len(slots) :])
    by_key = {(slot.kind, slot.name): tensor for slot, tensor in zip(slots, tensors, strict=False)}
    by_key = {(InputKind.INPUT, name): tensor for name, tensor in derived.inputs.items()} | by_key
    results = run(derived, [by_key[slot.slot.kind, slot.slot.name] for slot in derived.executable.inputs])
    slots = zip(derived.executable.outputs, results, strict=True)
    by_name = {slot.slot.name: result for slot, result in slots if slot.slot.kind == OutputKind.OUTPUT}
    return [by_name[f"output:{index}"] for index in range(len(names))]


def _differentiable_gradients(ctx: Any, tangents: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the results of `_gradients` as the outputs of a node of autograd's graph, for `create_graph=True`."""
    pairs = zip(ctx.tensors, ctx.needs_input_grad[2:], strict=True)
    reached = [tensor if needed else None for tensor, needed in pairs]
    results = GradientFunction.apply(ctx, tuple(tangents), *reached, *tangents.values())
    return dict(zip(ctx.gradient_names, results, strict=True))


def _gradients(ctx: Any, tangents: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the gradients that autograd needs, by the names of the inputs. `tangents` are gradients of outputs.

    They come from the program's backward phase, or from a second program if the first has no input for a tangent.
    """
    executable, likes = ctx.call.executable, _wanted(ctx)
    if not tangents.keys() <= {slot.slot.name for slot in executable.tangents}:
        return _run_whole(ctx, ctx.call.all_tangents(), tangents)
    needed = frozenset().union(*(executable.read_by_backward.get(name, frozenset()) for name in likes))
    check_versions([slot.slot for slot in executable.inputs], ctx.tensors, ctx.versions, needed)
    saved = _saved(ctx)
    ctx.maybe_clear_saved_tensors()  # `saved` holds them now, unless the user retains the graph
    return executable.run_backward(saved, tangents, likes)


def _is_returned_with_grad(slot: InputSlot | OutputSlot) -> bool:
    return isinstance(slot, OutputSlot) and slot.kind is OutputKind.OUTPUT and not slot.detached


def _wanted(ctx: Any) -> dict[str, torch.Tensor]:
    inputs = zip(ctx.call.executable.inputs, ctx.tensors, ctx.needs_input_grad[2:], strict=True)
    return {slot.slot.name: tensor for slot, tensor, needed in inputs if needed}


def _tangents(executable: Executable, grads: Sequence[torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """Return the given gradients of outputs by the names of tangents: "tangent:3" for "output:3"."""
    return {
        slot.slot.name.replace("output:", "tangent:"): grad
        for slot, grad in zip(executable.outputs, grads, strict=True)
        if grad is not None and slot.slot.kind == OutputKind.OUTPUT
    }


def _run_whole(ctx: Any, executable: Executable, tangents: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return gradients from forward and backward of a second program, which has more tangents, on the saved inputs."""
    check_versions([slot.slot for slot in ctx.call.executable.inputs], ctx.tensors, ctx.versions)
    kept = zip(ctx.call.executable.inputs, ctx.tensors, strict=True)
    by_key = {(slot.slot.kind, slot.slot.name): tensor for slot, tensor in kept}
    _, saved = executable.run_forward_locally([by_key[slot.slot.kind, slot.slot.name] for slot in executable.inputs])
    return executable.run_backward(saved, tangents, _wanted(ctx))


def _plain(grad: torch.Tensor) -> torch.Tensor:
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def _distinct(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the outputs with repeated objects copied, because autograd tells results apart by identity."""
    seen: set[int] = set()
    result = []
    for output in outputs:
        result.append(output.clone() if id(output) in seen else output)
        seen.add(id(output))
    return result


_TENSOR = object()
"""A mark in the place of a tensor, among constants."""


def _save(ctx: Any, saved: Sequence[LocalValue]) -> tuple[list[Any], pytree.TreeSpec]:
    """Save the tensors in local values for the backward; return the layout from which `_saved` restores the values."""
    leaves, tree = pytree.tree_flatten(list(saved))
    ctx.save_for_backward(*(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)))
    return [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], tree


def _saved(ctx: Any) -> list[LocalValue]:
    tensors, (leaves, tree) = iter(ctx.saved_tensors), ctx.layout
    return pytree.tree_unflatten([next(tensors) if leaf is _TENSOR else leaf for leaf in leaves], tree)
