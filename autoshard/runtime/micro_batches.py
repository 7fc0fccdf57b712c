"""A batch cut into micro-batches: equal parts of dim 0 of all of a call's tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autoshard.errors import TraceError
from autoshard.runtime.traced_step import Part


@dataclass(frozen=True, slots=True)
class CutBatch:
    """A tensor of a batch that was cut where it was loaded: the rows of each micro-batch."""

    parts: tuple[torch.Tensor, ...]


def parts_of(args: Sequence[Any], kwargs: Mapping[str, Any], parts: int) -> list[Part]:
    """The call of each micro-batch.

    Raises:
        TraceError: the tensors have no common size along dim 0 that `parts` divides.
    """
    if parts == 1:
        return [(tuple(args), dict(kwargs))]
    leaves, tree = pytree.tree_flatten((tuple(args), dict(kwargs)))
    size = _checked_size(leaves, parts)
    cut = [_cut(leaf, size, parts) for leaf in leaves]
    return [pytree.tree_unflatten(list(part), tree) for part in zip(*cut, strict=True)]


def batch_size(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """The size of dim 0 that all tensors of a call have; None where they have none in common."""
    sizes = _sizes(pytree.tree_leaves((tuple(args), dict(kwargs))))
    return next(iter(sizes)) if len(sizes) == 1 else None


def _sizes(leaves: Sequence[Any]) -> set[int]:
    cut = {sum(part.shape[0] for part in leaf.parts) for leaf in leaves if isinstance(leaf, CutBatch)}
    return cut | {leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0}


def _checked_size(leaves: list[Any], parts: int) -> int:
    sizes = _sizes(leaves)
    if len(sizes) != 1 or next(iter(sizes)) % parts:
        raise TraceError(
            f"micro_batches={parts} cuts dim 0 of every input into {parts} equal parts, but the inputs have sizes "
            f"{sorted(sizes)} there. Give all inputs one batch size that {parts} divides."
        )
    return next(iter(sizes))


def _cut(leaf: Any, size: int, parts: int) -> list[Any]:
    if isinstance(leaf, CutBatch):
        return list(leaf.parts)
    if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
        return [leaf] * parts
    return list(leaf.split(size // parts))
