"""Bags of equal size, `embedding_bag` over rows of ids, as an embedding and a reduction of each row.

torch flattens the rows, and finds each bag by its offset in the whole batch. So neither ranks nor micro-batches could
split the bags.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def _embedding_bag(input: Tensor, weight: Tensor, *rest: Any, **options: Any) -> Tensor:
    """Return `F.embedding_bag(...)`. It is computed row by row if `input` has rows of ids, and by torch if not.

    Frequencies of ids and norms of rows depend on the whole batch, so torch computes with these options too.
    """
    given = dict(zip(_OPTIONS, rest, strict=False)) | options
    is_plain = all(given.get(name) is None for name in ("offsets", "max_norm")) and not given.get("scale_grad_by_freq")
    weights, mode = given.get("per_sample_weights"), given.get("mode", "mean")
    is_weighted = isinstance(weights, Tensor)
    is_valid = mode in _REDUCTIONS and (not is_weighted or (mode == "sum" and weights.shape == input.shape))
    has_rows = input.dim() == 2 and not input.is_nested and input.shape[1] > 0 and weight.dim() == 2
    if not (is_plain and is_valid and has_rows and not input.is_floating_point()):
        return F.embedding_bag(input, weight, *rest, **options)
    rows, padding = F.embedding(input, weight), given.get("padding_idx")
    kept = None if padding is None else (input != padding % weight.shape[0])[..., None]
    return _REDUCTIONS[mode](rows * weights[..., None] if is_weighted else rows, kept).to(weight.dtype)


def _sum(rows: Tensor, kept: Tensor | None) -> Tensor:
    return (rows if kept is None else torch.where(kept, rows, 0.0)).sum(1)


def _mean(rows: Tensor, kept: Tensor | None) -> Tensor:
    return rows.mean(1) if kept is None else _sum(rows, kept) / kept.sum(1).clamp(min=1)


def _max(rows: Tensor, kept: Tensor | None) -> Tensor:
    if kept is None:
        return rows.max(1).values
    return torch.where(kept.any(1), torch.where(kept, rows, -torch.inf).max(1).values, 0.0)


_REDUCTIONS: Mapping[str, Callable[[Tensor, Tensor | None], Tensor]] = {"sum": _sum, "mean": _mean, "max": _max}
"""Mode of a bag → function from the rows of each bag [N, L, D], and a mask of the rows that count, to the bags."""

_OPTIONS = (
    *("offsets", "max_norm", "norm_type", "scale_grad_by_freq", "mode", "sparse", "per_sample_weights"),
    *("include_last_offset", "padding_idx"),
)
"""Names of the arguments of `F.embedding_bag` behind the first two, in order."""

BAGS: Mapping[Any, Callable[..., Any]] = {F.embedding_bag: _embedding_bag}
"""Function of torch → the function that replaces it during a trace."""
