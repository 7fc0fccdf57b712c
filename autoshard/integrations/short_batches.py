"""Convert a batch of fewer rows than usual into the form that a step takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autoshard.data.rows import RankRows
from autoshard.runtime.train_step import TrainStep


def cut_short_batch(batch: Any, step: TrainStep, whole: int, device: torch.device) -> Any:
    """Return a batch in the form in which a step takes it.

    A batch of `whole` rows is returned itself. A shorter batch is cut into micro-batches of the usual size, in which
    rows are repeated, unless the step plans batches of any size.

    Args:
        batch: a pytree of tensors whose first dim is the rows, and other values.
        step: the step.
        whole: rows of a usual batch.
        device: the device of the tensors.

    Raises:
        TraceError: a tensor has another number of rows.
    """
    count, parts = rows_in(batch), step.micro_batches
    if count in (None, whole) or (parts == 1 and step.plans_any_batch):
        return batch
    if isinstance(batch, Mapping):
        batch = dict(batch)  # a type that pytree does not know, such as BatchEncoding
    rows = RankRows(whole, parts, device=device)
    own = torch.tensor(rows.of(count), device=device)
    picked = pytree.tree_map(lambda item: item[own] if _has_rows(item) and len(item) == count else item, batch)
    return rows.whole(picked, count, "the first dim of every tensor of a batch must be its samples")


def rows_in(batch: Any) -> int | None:
    """Return the size of dim 0 of the first tensor in a batch; None without tensors."""
    leaves = pytree.tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    return next((len(item) for item in leaves if _has_rows(item)), None)


def _has_rows(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.dim() > 0
