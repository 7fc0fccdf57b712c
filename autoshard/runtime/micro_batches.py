"""Split a batch into micro-batches (equal parts along dim 0 of all tensors), and find the weights of their losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autoshard.errors import AutoshardError, NotAvailableError, TraceError
from autoshard.ir.loss import no_loss
from autoshard.ir.loss_weights import ReadInput
from autoshard.ir.program import InputKind
from autoshard.ir.request import CompiledProgram
from autoshard.runtime.executable import Executable
from autoshard.runtime.sharded_module import ShardedModule
from autoshard.runtime.signature import FlatCall

Part = tuple[Sequence[Any], Mapping[str, Any]]
"""Positional and keyword arguments of a micro-batch."""

Find = Callable[[Sequence[Any], Mapping[str, Any]], tuple[Executable, FlatCall]]
"""Function from the arguments of a micro-batch to the program that runs its step, and the flattened call."""


@dataclass(frozen=True, slots=True)
class CutBatch:
    """A tensor of a batch that is already split.

    `parts` has a tensor for each micro-batch, with its rows.
    """

    parts: tuple[torch.Tensor, ...]


def parts_of(args: Sequence[Any], kwargs: Mapping[str, Any], parts: int) -> list[Part]:
    """Split the arguments of a call into `parts` equal parts along dim 0; return the arguments of each micro-batch.

    An argument that is no tensor, or a tensor without dims, is passed to each micro-batch.

    Raises:
        TraceError: tensors differ in the size of dim 0, or `parts` does not divide it.
    """
    if parts == 1:
        return [(tuple(args), dict(kwargs))]
    leaves, tree = pytree.tree_flatten((tuple(args), dict(kwargs)))
    size = _checked_size(leaves, parts)
    cut = [_cut(leaf, size, parts) for leaf in leaves]
    return [pytree.tree_unflatten(list(part), tree) for part in zip(*cut, strict=True)]


@contextmanager
def naming_micro_batches(parts: int) -> Iterator[None]:
    """Within the context, an error of the model's own code gets a note that the model saw only a part of the batch."""
    try:
        yield
    except TraceError as error:
        if parts == 1 or error.__cause__ is None or isinstance(error.__cause__, AutoshardError):
            raise
        raise TraceError(
            f"micro_batches={parts} calls the model with one of {parts} equal parts of the batch. A model that needs "
            "the whole batch (a table of the batch's size, batch norm over one row of a part) cannot run in "
            f"micro-batches. Leave micro_batches out, or give larger batches. {error}"
        ) from error.__cause__


def batch_size(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """Return the size of dim 0 that all tensors of a call have; None if sizes differ, or if there is no tensor."""
    sizes = _sizes(pytree.tree_leaves((tuple(args), dict(kwargs))))
    return next(iter(sizes)) if len(sizes) == 1 else None


def _sizes(leaves: Sequence[Any]) -> set[int]:
    cut = {sum(part.shape[0] for part in leaf.parts) for leaf in leaves if isinstance(leaf, CutBatch)}
    return cut | {leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0}


def _checked_size(leaves: list[Any], parts: int) -> int:
    sizes = _sizes(leaves)
    if len(sizes) != 1 or next(iter(sizes)) % parts:
        raise TraceError(
            f"micro_batches={parts} splits dim 0 of every input into {parts} equal parts, but the inputs have sizes "
            f"{sorted(sizes)} there. Give all inputs one batch size that {parts} divides."
        )
    return next(iter(sizes))


def _cut(leaf: Any, size: int, parts: int) -> list[Any]:
    if isinstance(leaf, CutBatch):
        return list(leaf.parts)
    if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
        return [leaf] * parts
    return list(leaf.split(size // parts))


def common_program(sharded: ShardedModule, parts: Sequence[Part], find: Find) -> tuple[Executable, Sequence[FlatCall]]:
    """Return the program that runs all micro-batches, and the flattened call of each micro-batch.

    If the model branches on values, micro-batches may have different programs. The returned program takes the same
    branches as the whole batch. `find` is called once for each micro-batch.

    Raises:
        NotAvailableError: no micro-batch's program takes the branches of the whole batch.
    """
    executables, calls = zip(*(find(*part) for part in parts), strict=True)
    found = dict.fromkeys(executables)
    first = executables[0]
    if len(parts) == 1 or not first.phased.lowered.traced.guards:
        return first, calls
    read = _reader_of(sharded, parts)
    for executable in found:
        weights = executable.compiled.weights
        branches = None if weights is None else weights.branches
        is_alike = len(found) == 1 if branches is None else branches.are_of_batch(len(parts), read)
        if is_alike:
            return executable, calls
    raise NotAvailableError(
        f"micro_batches={len(parts)}: the model branches on the values of its inputs, and no part of this batch is "
        "known to take the branches of the whole batch. Compute without the branch (torch.where), or leave "
        "micro_batches, and the axis 'pipeline' of the mesh, out for this model."
    )


def weights_of(sharded: ShardedModule, compiled: CompiledProgram, parts: Sequence[Part]) -> list[float]:
    """Return the weight of each micro-batch's loss in the loss of the batch. `compiled` is the micro-batches' program.

    Raises:
        NotAvailableError: the loss is not a weighted sum over micro-batches.
    """
    if len(parts) == 1:
        return [1.0]
    if compiled.weights is None:
        raise no_loss([tuple(slot.shape) for slot in compiled.phased.lowered.outputs])
    return compiled.weights.of_parts(len(parts), _reader_of(sharded, parts))


def share_of(loss: torch.Tensor, weight: float) -> torch.Tensor:
    """Return a micro-batch's loss times its weight; if the weight is zero, a zero without gradient."""
    return loss * weight if weight else torch.zeros_like(loss, requires_grad=False)


def sum_of(shares: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the loss of the batch: the sum of the micro-batches' weighted losses, in order."""
    return shares[0] if len(shares) == 1 else torch.stack(list(shares)).sum()


def _reader_of(sharded: ShardedModule, parts: Sequence[Part]) -> ReadInput:
    """Return a function that takes the number of a micro-batch, and kind and name of an input or buffer.

    It returns the whole tensor.
    """
    calls = [FlatCall.of(*part).tensors for part in parts]

    def read(part: int, kind: str, name: str) -> torch.Tensor:
        value = calls[part][name] if kind == InputKind.INPUT else sharded.get_buffer(name)
        return value.full_tensor() if isinstance(value, DTensor) else value

    return read
