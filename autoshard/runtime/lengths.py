"""Calls of many lengths served by few programs: inputs are padded to one of few lengths, outputs are cut back.

The lengths are 8, 12, 16, 24, 32, 48 and so on, each a half or a third more than the one before. That padding changes
nothing is for the user to say and for the model to see to (a mask, targets that the loss leaves out); it is checked
at the first call that pads: in evaluation, the padded call and the call as it is must have the same results.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoshard.errors import TraceError
from autoshard.ir.program import InputKind, OutputKind, Program
from autoshard.runtime.signature import FlatCall

DIM = 1
"""The dim of inputs that is padded; dim 0 is the batch."""

_SHORTEST = 8
_TOLERANCE, _NARROW_TOLERANCE = 1e-4, 3e-2
"""Errors relative to a result's largest element that are taken for rounding: of 32 bits or more, and of fewer."""

Run = Callable[[FlatCall], Any]
Grown = Mapping[int, int]
"""Dims of a result that grow with the inputs, with how much longer than these they are (-1 of shifted predictions)."""


def padded_length(length: int) -> int:
    """The length that inputs of `length` are padded to.

    Example:
        >>> [padded_length(length) for length in (1, 9, 12, 13, 100)]
        [8, 12, 12, 16, 128]
    """
    power = max(_SHORTEST, 1 << (length - 1).bit_length())
    middle = 3 * power // 4
    return middle if length <= middle and middle > _SHORTEST else power


@dataclass(slots=True)
class Lengths:
    """How a module's calls are padded.

    Args:
        model: the user's model, whose `forward` names the arguments.
        padding: name of an argument, or "input:2" for the positional one with that number, to what its padding holds.
    """

    model: nn.Module
    padding: Mapping[str, float]
    _cuts: dict[int, Grown] | None = field(default=None, init=False)
    """What grows with the inputs, by the number of the result; None until it was checked."""

    def pad(self, call: FlatCall) -> tuple[FlatCall, int]:
        """The call with padded inputs, and the length that they had.

        Raises:
            TraceError: an argument that is to be padded is missing, no tensor, or not as long as the others.
        """
        args, kwargs = call.assemble(call.leaves)
        lengths = {name: self._length(name, value) for name, value in self._named(args, kwargs).items()}
        if len(set(lengths.values())) != 1:
            raise TraceError(
                f"dynamic_lengths pads dim {DIM} of {', '.join(self.padding)}, which must be equally long, but the "
                f"lengths of this call are {lengths}. Name arguments that the call has and that share one length."
            )
        length = next(iter(lengths.values()))
        more = padded_length(length) - length
        if not more:
            return call, length
        kwargs = {name: self._pad(name, value, more) for name, value in kwargs.items()}
        args = tuple(self._pad(self._position(i), value, more) for i, value in enumerate(args))
        return FlatCall.of(args, kwargs, call.outputs), length

    def check(self, exact: FlatCall, padded: FlatCall, run: Run) -> None:
        """Compare the results of the two calls, the first time; `run` runs one in evaluation.

        Raises:
            TraceError: padding changes a result.
        """
        if self._cuts is not None or exact is padded:
            return
        expected, found = _tensors(run(exact)), _tensors(run(padded))
        if expected.keys() != found.keys():
            raise TraceError(f"dynamic_lengths: padding changes which results the model has, {[*expected]}.")
        lengths = [self._length_of(call) for call in (exact, padded)]
        cuts = {number: _grown(number, expected[number], found[number], *lengths) for number in expected}
        for number, value in found.items():
            _compare(number, expected[number], _cut(value, cuts[number], lengths[0]))
        self._cuts = cuts

    def cut(self, outputs: Any, length: int) -> Any:
        """The results of a padded call, without what stands for padding."""
        if self._cuts is None:
            return outputs
        leaves, tree = pytree.tree_flatten(outputs)
        for number, grown in self._cuts.items():
            leaves[number] = _cut(leaves[number], grown, length)
        return pytree.tree_unflatten(leaves, tree)

    def _length_of(self, call: FlatCall) -> int:
        return next(iter(self._named(*call.assemble(call.leaves)).values())).shape[DIM]

    def _named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments that are padded."""
        given = {self._position(index): value for index, value in enumerate(args)} | dict(kwargs)
        return {name: given[name] for name in self.padding if given.get(name) is not None}

    def _position(self, index: int) -> str:
        """The name of a positional argument."""
        names = list(inspect.signature(self.model.forward).parameters)
        number = f"input:{index}"
        return number if number in self.padding or index >= len(names) else names[index]

    def _length(self, name: str, value: Any) -> int:
        if not isinstance(value, torch.Tensor) or value.dim() <= DIM:
            found = f"shape={tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise TraceError(
                f"dynamic_lengths pads dim {DIM} of {name!r}, a tensor of two dims or more; found {found}."
            )
        return value.shape[DIM]

    def _pad(self, name: str, value: Any, more: int) -> Any:
        if name not in self.padding or value is None:
            return value
        shape = [*value.shape]
        shape[DIM] = more
        return torch.cat([value, value.new_full(shape, self.padding[name])], DIM)


def refuse_statistics(program: Program) -> None:
    """Raise for a program that a padded call would run and that puts what it computes into buffers.

    Raises:
        TraceError: it names the buffer; padding would count in its value.
    """
    read = {slot.name: slot.node for slot in program.inputs if slot.kind == InputKind.BUFFER}
    nodes = program.nodes_by_name()
    for slot in program.outputs:
        if slot.kind == OutputKind.BUFFER_UPDATE and nodes[read[slot.name]].meta["val"].is_floating_point():
            raise TraceError(
                f"dynamic_lengths: the model updates buffer {slot.name!r} in training (statistics of the batch, say), "
                "and padding would count in it. Leave dynamic_lengths out, or call the model in evaluation."
            )


def _tensors(outputs: Any) -> dict[int, torch.Tensor]:
    leaves = pytree.tree_leaves(outputs)
    return {number: leaf.detach() for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}


def _grown(number: int, expected: torch.Tensor, found: torch.Tensor, length: int, padded: int) -> Grown:
    """The dims in which a result of the padded call is larger; it must be so by the padding."""
    dims = [dim for dim, size in enumerate(expected.shape) if found.dim() <= dim or found.shape[dim] != size]
    differences = {dim: expected.shape[dim] - length for dim in dims}
    if found.dim() != expected.dim() or any(found.shape[dim] != padded + more for dim, more in differences.items()):
        raise TraceError(
            f"dynamic_lengths: result {number} of the model has shape={tuple(expected.shape)} for inputs of length "
            f"{length}, and {tuple(found.shape)} for {padded}: it does not grow as they do. Leave dynamic_lengths out."
        )
    return differences


def _cut(value: torch.Tensor, grown: Grown, length: int) -> torch.Tensor:
    for dim, more in grown.items():
        value = value.narrow(dim, 0, length + more)
    return value


def _compare(number: int, expected: torch.Tensor, found: torch.Tensor) -> None:
    """Raise unless the two are equal but for rounding."""
    if not expected.numel():
        return
    narrow = expected.is_floating_point() and expected.dtype.itemsize < 4
    scale = float(expected.double().abs().nan_to_num(0.0, 0.0, 0.0).max())
    tolerance = (_NARROW_TOLERANCE if narrow else _TOLERANCE) * scale
    if not torch.allclose(found.double(), expected.double(), rtol=0.0, atol=tolerance, equal_nan=True):
        error = float((found.double() - expected.double()).abs().max())
        raise TraceError(
            f"dynamic_lengths: padding changes result {number} of the model by up to {error:.3g} (largest element: "
            f"{scale:.3g}). The model must not look at padding: pad an attention mask with 0, targets with what the "
            "loss leaves out (-100), and take means over what is counted; or leave dynamic_lengths out."
        )
