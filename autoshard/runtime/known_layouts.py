"""Convert DTensors to local values and back, fast if their sharding is the same as in the previous call.

Torch describes a DTensor's sharding by a spec object (`_spec`), which it replaces and never changes. If a program can
read a DTensor's local tensor as it is, this module remembers the spec object for the program's slot. In the next call,
a DTensor with the same object needs no conversion. No tensor is remembered, so no memory is kept alive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, is_
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autoshard.ir.lowered import LocalSlot
from autoshard.ir.program import InputKind

_LASTING = (InputKind.PARAMETER, InputKind.STATE)
"""Kinds of inputs that are the same tensors at each call."""

Read = Callable[[torch.Tensor, LocalSlot], torch.Tensor]
"""Function `Engine.read`: it returns the local value of a user's tensor for a slot."""
WriteLike = Callable[[torch.Tensor, LocalSlot, torch.Tensor], torch.Tensor]
"""Function `Engine.write_like`: it returns a local value as a tensor that is sharded like another tensor."""


class Reader:
    """A function that returns the local values of a program's inputs.

    Args:
        slots: the program's input slots, in order.
        read: converts one tensor, where no remembered spec object helps.
    """

    def __init__(self, slots: Sequence[LocalSlot], read: Read) -> None:
        self._slots = slots
        self._read = read
        self._lasting = {index for index, slot in enumerate(slots) if slot.slot.kind in _LASTING}
        self._specs: dict[int, Any] = {}
        self._others = range(len(slots))

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the local values of `tensors`; both are in the order of the slots."""
        found = self._locals_of([tensors[index] for index in self._specs])
        if found is None:
            self._specs, self._others, found = {}, range(len(self._slots)), []
        for index in self._others:
            found.insert(index, self._read(tensors[index], self._slots[index]))
        if not self._specs:
            self._learn(tensors, found)
        return found

    def _locals_of(self, tensors: list[Any]) -> list[torch.Tensor] | None:
        """Return the local tensors of DTensors without conversion, if all have remembered specs; else None.

        The local tensors must also be contiguous and plain.
        """
        if not are_dtensors(tensors) or not all(map(is_, map(_spec_of, tensors), self._specs.values())):
            return None
        found = [*map(local_of, tensors)]
        are_there = set(map(type, found)) <= {torch.Tensor} and all(map(torch.Tensor.is_contiguous, found))
        return found if are_there else None

    def _learn(self, tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        pairs = enumerate(zip(tensors, values, strict=True))
        alike = {i: tensor for i, (tensor, value) in pairs if i in self._lasting and _has_memory(tensor, value)}
        self._specs = {index: _spec_of(tensor) for index, tensor in alike.items()}
        self._others = [index for index in range(len(tensors)) if index not in alike]


class LikeWriter:
    """A function that makes DTensors from a program's results, with the placements of given DTensors.

    Args:
        slots: the program's output slots, in order.
        write_like: converts one value, where no remembered spec object helps.
    """

    def __init__(self, slots: Sequence[LocalSlot], write_like: WriteLike) -> None:
        self._slots = slots
        self._write_like = write_like
        self._specs: list[tuple[Any, Any]] = [(None, None)] * len(slots)

    def __call__(self, values: Sequence[torch.Tensor], likes: Sequence[torch.Tensor | None]) -> list[Any]:
        """Return each value as a tensor that is sharded like its tensor in `likes`; None if `likes` has None."""
        found: list[Any] = []
        for index, (value, like) in enumerate(zip(values, likes, strict=True)):
            spec, made = self._specs[index]
            if like is None:
                found.append(None)
            elif isinstance(like, DTensor) and like._spec is spec and value.is_contiguous():
                found.append(DTensor.__new__(DTensor, value, made, requires_grad=False))  # `__init__` does nothing
            else:
                found.append(self._write_anew(value, like, index))
        return found

    def _write_anew(self, value: torch.Tensor, like: torch.Tensor, index: int) -> torch.Tensor:
        written = self._write_like(value, self._slots[index], like)
        if isinstance(written, DTensor) and isinstance(like, DTensor) and is_same_memory(value, written._local_tensor):
            self._specs[index] = like._spec, written._spec
        return written


def is_same_memory(value: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same memory, with the same shape and strides."""
    return (value.data_ptr(), value.shape, value.stride()) == (other.data_ptr(), other.shape, other.stride())


def are_dtensors(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all tensors have the type DTensor. Parameters that are DTensors have this type too."""
    return set(map(type, tensors)) <= {DTensor}


local_of = attrgetter("_local_tensor")
"""The local tensor of a DTensor."""
_spec_of = attrgetter("_spec")


def _has_memory(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    return type(tensor) is DTensor and is_same_memory(value, tensor._local_tensor)
