"""Raise an error if a tensor was changed in place between a call and its backward, as on one device.

A compiled program saves each rank's part of a value, often in new memory, where autograd does not see the change. So
this module compares the versions (torch's counts of in-place changes) of the program's parameters, buffers and inputs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from autoshard.errors import ChangedInPlaceError
from autoshard.ir.program import InputKind, InputSlot, OutputKind, Program

Key = tuple[InputKind, str]
"""Kind and name of an input of a program."""

Version = tuple[int, ...] | None
"""The number of in-place changes of a tensor; for a DTensor, also of its shard; None if torch does not count them."""


def version_of(tensor: torch.Tensor) -> Version:
    """Return the version of a tensor; for a DTensor, also of its shard; None for an inference tensor."""
    if tensor.is_inference():
        return None
    if isinstance(tensor, DTensor):
        return tensor._version, tensor._local_tensor._version
    return (tensor._version,)


def check_versions(
    slots: Sequence[InputSlot],
    tensors: Sequence[torch.Tensor],
    versions: Sequence[Version],
    needed: Collection[Key] | None = None,
) -> None:
    """Raise `ChangedInPlaceError` if an input of a program was changed in place since the forward.

    Args:
        slots: the program's inputs.
        tensors: the tensor of each input.
        versions: the version of each tensor in the forward.
        needed: kinds and names of the inputs to check; None: all.
    """
    for slot, tensor, version in zip(slots, tensors, versions, strict=True):
        if (needed is None or (slot.kind, slot.name) in needed) and version_of(tensor) != version:
            raise ChangedInPlaceError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{slot.kind.value} {slot.name!r} was changed in place between forward and backward (shape="
                f"{tuple(tensor.shape)}, version {version}, now {version_of(tensor)}), and the backward needs its old "
                "value. Call backward before you change it, or clone it."
            )


def inputs_behind_gradients(program: Program) -> dict[str, frozenset[Key]]:
    """Return the inputs whose values the backward reads for each gradient, by the name of its parameter or input.

    An operator of the backward reads an input's value if its operand is the input, or a view of it. A value computed
    from an input (a cast of a weight) has memory of its own, which no change of the input reaches.
    """
    slots = {slot.node: (slot.kind, slot.name) for slot in program.inputs if slot.kind in _CAN_CHANGE}
    owners: dict[fx.Node, frozenset[Key]] = {}
    behind: dict[fx.Node, frozenset[Key]] = {}
    for node in program.graph.nodes:
        operands = node.all_input_nodes
        if node.op == "placeholder":
            owners[node] = frozenset({slots[node.name]} if node.name in slots else ())
            behind[node] = _NONE
        elif node.meta.get("phase") == "forward":
            owners[node] = _union(owners, operands) if _is_same_value(node) else _NONE
            behind[node] = _NONE
        else:
            owners[node] = _NONE
            behind[node] = _union(behind, operands) | _union(owners, operands)
    by_name = {node.name: inputs for node, inputs in behind.items()}
    return {slot.name: by_name.get(slot.node, _NONE) for slot in program.outputs if slot.kind in _GRADIENTS}


_NONE: frozenset[Key] = frozenset()
_CAN_CHANGE = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.INPUT)
_GRADIENTS = (OutputKind.GRADIENT, OutputKind.INPUT_GRADIENT)


def _union(sets: Mapping[fx.Node, frozenset[Key]], nodes: Sequence[fx.Node]) -> frozenset[Key]:
    return frozenset().union(*(sets.get(node, _NONE) for node in nodes))


def _is_same_value(node: fx.Node) -> bool:
    """Whether a node's result has its operand's memory: a view, an element of a tuple, or an identity."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:  # an identity function, or an element of a tuple
        return node.op == "call_function"
    return any(item.alias_info is not None for item in schema.returns)
