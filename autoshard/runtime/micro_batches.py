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
from autoshard.ir.dataclass_nodes import register_dataclasses
from autoshard.ir.loss import no_loss
from autoshard.ir.loss_weights import LossWeights, ReadInput
from autoshard.ir.program import InputKind
from autoshard.ir.request import CompiledProgram, Request
from autoshard.runtime.executable import Executable
from autoshard.runtime.sharded_module import ShardedModule
from autoshard.runtime.signature import FlatCall

Part = tuple[Sequence[Any], Mapping[str, Any]]
"""Positional and keyword arguments of a micro-batch."""

Find = Callable[[Sequence[Any], Mapping[str, Any]], tuple[Executable, FlatCall]]
"""Function from the arguments of a micro-batch to the program that runs its step, and the flattened call."""


Weigh = Callable[[Request], LossWeights | None]
"""Function from the request of one micro-batch's call to the weights of micro-batches in the loss of a batch.

`passes.verification` implements it.
"""


def weighs_nothing(request: Request) -> None:
    """Return None. This `Weigh` is for steps without copied rows, whose weights are in `CompiledProgram.weights`."""


@dataclass(frozen=True, slots=True)
class CutBatch:
    """A tensor of a batch that is already split.

    Args:
        parts: the rows of each micro-batch; all micro-batches have the same number of rows.
        copies: see `MicroBatches`.
    """

    parts: tuple[torch.Tensor, ...]
    copies: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """The micro-batches of a batch.

    Args:
        parts: the arguments of each micro-batch.
        copies: for each micro-batch, how many times each of its rows occurs in it; 0: the micro-batch does not count.
            All are 1 for a whole batch. The last batch of an epoch may have fewer rows (`autoshard.data`).
    """

    parts: Sequence[Part]
    copies: Sequence[int]

    def __len__(self) -> int:
        return len(self.parts)

    @property
    def is_whole(self) -> bool:
        """Whether there is only one micro-batch, with each row once."""
        return tuple(self.copies) == (1,)


def parts_of(args: Sequence[Any], kwargs: Mapping[str, Any], parts: int) -> MicroBatches:
    """Split the arguments of a call into `parts` equal parts along dim 0.

    An argument that is no tensor, or a tensor without dims, is passed to each micro-batch. A `CutBatch` among the
    arguments is split already, and its number of micro-batches may be a multiple of `parts`.

    Raises:
        TraceError: the tensors differ in the size of dim 0, or `parts` does not divide it.
    """
    given = pytree.tree_leaves((tuple(args), dict(kwargs)))
    register_dataclasses([leaf for leaf in given if not isinstance(leaf, CutBatch)])
    leaves, tree = pytree.tree_flatten((tuple(args), dict(kwargs)))
    if parts == 1 and not any(isinstance(leaf, CutBatch) for leaf in leaves):
        return MicroBatches([(tuple(args), dict(kwargs))], (1,))
    copies = next((leaf.copies for leaf in leaves if isinstance(leaf, CutBatch)), (1,) * parts)
    size = _checked_size(leaves, len(copies))
    cut = [_cut(leaf, size, len(copies)) for leaf in leaves]
    return MicroBatches([pytree.tree_unflatten(list(part), tree) for part in zip(*cut, strict=True)], copies)


@contextmanager
def naming_micro_batches(parts: int) -> Iterator[None]:
    """Within the context, an error of the model's own code gets a note that the model saw only a part of the batch."""
    try:
        yield
    except TraceError as error:
        if parts == 1 or error.__cause__ is None or isinstance(error.__cause__, AutoshardError):
            raise
        raise TraceError(
            f"{error} micro_batches={parts} calls the model with one of {parts} equal parts of the batch. A model may "
            "need the whole batch: a table of the batch's size, or batch norm over one row of a part. Then leave "
            "micro_batches out, or give larger batches."
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
    if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0 or not size:
        return [leaf] * parts  # an empty batch is refused where the call is traced
    return list(leaf.split(size // parts))


@dataclass(slots=True)
class LossWeigher:
    """Finds how the losses of micro-batches are weighed.

    A step without micro-batches needs weights only for a batch with copied rows. They are then derived from two traces,
    and kept for the last such program and shapes.

    Args:
        sharded: the module of the step.
        weigh: derives the weights for a call of one micro-batch; returns None without a loss.
    """

    sharded: ShardedModule
    weigh: Weigh
    _last: tuple[CompiledProgram, list[torch.Size], LossWeights | None] | None = None

    def of(self, compiled: CompiledProgram, call: FlatCall) -> LossWeights | None:
        """Return the weights for the program of a micro-batch; None without a loss.

        Args:
            compiled: the program.
            call: a call of the program.
        """
        if compiled.weights is not None:
            return compiled.weights
        shapes = [tensor.shape for tensor in call.tensors.values()]  # a program may run padded calls
        if self._last is None or self._last[0] is not compiled or self._last[1] != shapes:
            with (
                torch.enable_grad(),
                self.sharded.agreement.working(),
                self.sharded.requesting(call, grad=True) as request,
            ):
                self._last = compiled, shapes, self.weigh(request)
        return self._last[2]

    def weights_of(self, compiled: CompiledProgram, batch: MicroBatches, calls: Sequence[FlatCall]) -> list[float]:
        """Return the weight of each micro-batch's loss in the loss of the batch.

        Args:
            compiled: the program of a micro-batch.
            batch: the micro-batches.
            calls: the call of the program for each micro-batch, with padded inputs if the program runs padded calls.

        Raises:
            NotAvailableError: the loss is not a weighted sum over micro-batches.
        """
        if batch.is_whole:
            return [1.0]
        weights = self.of(compiled, calls[0])
        if weights is None:
            raise no_loss([tuple(slot.shape) for slot in compiled.phased.lowered.outputs])
        return weights.of_parts(batch.copies, _reader_of(self.sharded, calls))


def common_program(weigher: LossWeigher, batch: MicroBatches, find: Find) -> tuple[Executable, Sequence[FlatCall]]:
    """Find the program that runs all micro-batches; return it with the flattened call of each micro-batch.

    If the model branches on values, micro-batches may have different programs. The result is then the program that
    takes the same branches as the whole batch.

    Args:
        weigher: finds the weights of losses, which say how a batch branches.
        batch: the micro-batches.
        find: finds the program for a micro-batch; called once for each.

    Raises:
        NotAvailableError: no micro-batch is known to take the branches of the whole batch.
    """
    executables, calls = zip(*(find(*part) for part in batch.parts), strict=True)
    found = dict.fromkeys(executables)
    first = executables[0]
    if batch.is_whole or not first.phased.lowered.traced.guards:
        return first, calls
    read = _reader_of(weigher.sharded, calls)
    for executable in found:
        weights = weigher.of(executable.compiled, calls[executables.index(executable)])
        branches = None if weights is None else weights.branches
        is_alike = len(found) == 1 if branches is None else branches.are_of_batch(batch.copies, read)
        if is_alike:
            return executable, calls
    raise NotAvailableError(
        f"micro_batches={len(batch)}: the model branches on the values of its inputs, and no part of this batch is "
        "known to take the branches of the whole batch. Compute without the branch (torch.where), or leave "
        "micro_batches, and the axis 'pipeline' of the mesh, out for this model."
    )


def share_of(loss: torch.Tensor, weight: float) -> torch.Tensor:
    """Return a micro-batch's loss times its weight; if the weight is zero, a zero without gradient."""
    return loss * weight if weight else torch.zeros_like(loss, requires_grad=False)


def sum_of(shares: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the loss of the batch: the sum of the micro-batches' weighted losses, in order."""
    return shares[0] if len(shares) == 1 else torch.stack(list(shares)).sum()


def _reader_of(sharded: ShardedModule, calls: Sequence[FlatCall]) -> ReadInput:
    """Return a function that takes the number of a micro-batch, and kind and name of an input or buffer.

    It returns the whole tensor. `calls` has the call of each micro-batch.
    """
    tensors = [call.tensors for call in calls]

    def read(part: int, kind: str, name: str) -> torch.Tensor:
        value = tensors[part][name] if kind == InputKind.INPUT else sharded.get_buffer(name)
        return value.full_tensor() if isinstance(value, DTensor) else value

    return read
