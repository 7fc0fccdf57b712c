"""The third way of tracing: Dynamo's graph of the call, for models whose Python cannot run on fake tensors.

Code that calls numpy is an example. Dynamo reads the model's bytecode into a graph of torch functions, and `joint` then
exports this graph. Modules are gone from the graph, so the program's nodes have no module path.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.functional_export import dynamo_graph_capture_for_export

from autoshard.errors import NotAvailableError, TraceError
from autoshard.ir.program import InputKind
from autoshard.ir.watched_numbers import is_watching
from autoshard.tracing.calling import ModelCall, TracedCall
from autoshard.tracing.joint import JointGraph, TraceOptions, export_joint


class _CallModule(nn.Module):
    def __init__(self, model: nn.Module, options: TraceOptions) -> None:
        super().__init__()
        self.model = model
        self.options = options

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.options.call(self.model, args, kwargs)


def capture_with_dynamo(model: nn.Module, call: TracedCall, options: TraceOptions) -> JointGraph:
    """Capture the call with Dynamo, and export the joint graph of the captured functions.

    Raises:
        NotAvailableError: Dynamo can capture the call, but `options` asks for a precision.
        TypeError: the call returns gradients, or the trace watches how Python uses numbers. Dynamo supports neither.
    """
    if is_watching():
        raise TypeError("Dynamo does not show how Python uses numbers")
    if not isinstance(options.call, ModelCall):
        raise TypeError("gradients of gradients are not captured by way of Dynamo")
    args, kwargs = call.assemble(_distinct_inputs(call.tensors.values()))
    plain = replace(options, call=replace(options.call, cast_inputs=None), casts=None)
    capture = dynamo_graph_capture_for_export(_CallModule(model, plain))
    with torch.set_grad_enabled(options.grad):
        captured = capture(*args, **kwargs)
    if options.casts is not None:
        raise NotAvailableError(
            f"{type(model).__qualname__} can only be traced by way of Dynamo, where a precision is not available: "
            "leave precision out (precision=None), or convert the model with model.to(dtype)."
        )
    joint = export_joint(captured, call, replace(options, call=ModelCall()))
    return replace(joint, slots=_own_slots(joint, captured, model), accesses=None)


def _distinct_inputs(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Return `tensors` as distinct objects, because Dynamo assumes that inputs which are one object stay one object."""
    return tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors)


def _own_slots(joint: JointGraph, captured: nn.Module, model: nn.Module) -> tuple[tuple[InputKind, str], ...]:
    """Return kind and name of each input. Parameters and buffers, which Dynamo has renamed, get the model's names."""
    own = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    held = {**dict(captured.named_parameters()), **dict(captured.named_buffers())}
    return tuple((kind, _own_name(name, held, own)) for kind, name in joint.slots)


def _own_name(name: str, held: dict[str, Tensor], own: dict[int, str]) -> str:
    if name not in held:
        return name
    if id(held[name]) not in own:
        raise TraceError(
            f"Dynamo captured the tensor {name!r}, which is no parameter or buffer of the model. Register it with "
            f"register_buffer, or pass it in as an input."
        )
    return own[id(held[name])]
