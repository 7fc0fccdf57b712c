"""Keys of calls: calls with equal keys may share a program."""

from __future__ import annotations

import hashlib
import types
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from autoshard.errors import TraceError
from autoshard.ir.derivative import Derivatives
from autoshard.ir.outputs import Outputs
from autoshard.runtime.members import Members
from autoshard.runtime.transforms import refuse_transforms


@dataclass(frozen=True, slots=True)
class FlatCall:
    """The arguments of a call, flattened by torch's pytree, with keyword arguments in the order of their names.

    Args:
        leaves: the flattened arguments.
        tree: pytree structure that nests the leaves into `(args, kwargs)`.
        outputs: the form of the returned outputs: sharded, whole, or the loss alone.
        as_compiled: whether the program is traced with `torch.compiler.is_compiling()` true.
        exact: the call before padding, if inputs are padded; else None.
    """

    leaves: tuple[Any, ...]
    tree: pytree.TreeSpec
    outputs: Outputs = Outputs.AS_PLANNED
    as_compiled: bool = False
    exact: FlatCall | None = None

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Outputs = Outputs.AS_PLANNED) -> FlatCall:
        """Flatten the arguments of a call; raise `NotAvailableError` for tensors under a transform of `torch.func`."""
        leaves, tree = pytree.tree_flatten((tuple(args), dict(sorted(kwargs.items()))))
        refuse_transforms(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        return cls(tuple(leaves), tree, outputs)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The leaves that are tensors, by input name ("input:0")."""
        return {f"input:{i}": leaf for i, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)}

    def flattened_again(self) -> FlatCall:
        """Return the same call, flattened again, after more types have been registered with pytree."""
        flattened = FlatCall.of(*self.assemble(self.leaves), self.outputs)
        return replace(flattened, as_compiled=self.as_compiled, exact=self.exact)

    def assemble(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the call's `(args, kwargs)` with its leaves replaced by `leaves`."""
        return pytree.tree_unflatten(list(leaves), self.tree)


def key_of(
    call: FlatCall,
    members: Members,
    *,
    grad: bool,
    updates: bool = False,
    all_tangents: bool = False,
    derivatives: Derivatives = (),
) -> Hashable:
    """Return a key of everything that a program depends on, except tensors' values and the model's Python values.

    The key covers shapes, dtypes, other leaves of the call, modes, and the model's parameters and buffers: their names,
    dtypes, ties, and which are frozen.

    Args:
        call: the call.
        members: the model's modules, parameters and buffers.
        grad: whether the call wants gradients.
        updates: whether the program is a whole training step.
        all_tangents, derivatives: fields of `Request`.
    """
    return (
        (updates, all_tangents, derivatives),
        grad,
        (call.outputs, call.as_compiled),
        repr(call.tree),
        tuple(_leaf_signature(leaf, grad=grad) for leaf in call.leaves),
        members.with_gradients if grad else members.without_gradients,
        tuple(torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda")),
    )


def check_devices(tensors: Mapping[str, torch.Tensor], device: torch.device, traced: Mapping[str, str]) -> None:
    """Raise `TraceError` if an input is on the meta device, or on another device type than in the trace.

    `traced` maps the name of an input to the device type on which it was traced. An input on the type of `device` is
    always accepted.
    """
    for name, tensor in tensors.items():
        found = tensor.device.type
        if found != device.type and (found == "meta" or traced.get(name, found) != found):
            wanted = traced.get(name, device.type)
            raise TraceError(
                f"{name} of shape={tuple(tensor.shape)} is on device={str(tensor.device)!r}, and the call computes on "
                f"{wanted!r}: move it with .to({wanted!r}). Tensors on 'meta' have no values, and serve only as "
                "example_inputs."
            )


def describe_call(call: FlatCall, *, grad: bool, training: bool) -> str:
    """Return a short text of a call for messages, such as `(int64[4, 16], int64[4, 16]), training`."""
    parts = [
        f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}" if isinstance(leaf, torch.Tensor) else _text(leaf)
        for leaf in call.leaves
    ]
    mode = ("training" if training else "evaluation") + ("" if grad else ", no gradients")
    mode += "" if call.outputs is Outputs.AS_PLANNED else f", {call.outputs}"
    return f"({', '.join(parts)}), {mode}"


def _text(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)} of NumPy" if isinstance(leaf, np.ndarray) else repr(leaf)


def _leaf_signature(leaf: Any, *, grad: bool) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return ("tensor", tuple(leaf.shape), leaf.dtype, grad and leaf.requires_grad)
    if isinstance(leaf, np.ndarray):
        content = repr(leaf.tolist()).encode() if leaf.dtype.hasobject else leaf.tobytes()
        return (type(leaf), leaf.shape, str(leaf.dtype), hashlib.sha256(content).hexdigest())
    if isinstance(leaf, (type, types.FunctionType, torch.Generator)):
        return leaf  # objects with one name may have equal texts
    return (type(leaf), repr(leaf))
