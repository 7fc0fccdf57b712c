"""Operators with one result row for each nonzero element, traced with the example's number of rows.

The shapes of `x[mask]`, `nonzero`, `masked_select`, `unique`, `bincount` and `repeat_interleave` depend on values. The
program makes a tensor of the example's size. A later call computes the number of rows again, and needs a new trace if
the number differs. This way of tracing is for numbers of rows without an upper bound (`bounded`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Count = Callable[[Callable[[Tensor], Tensor], Tensor], int]
"""Function called as `count(function, tensor)`. It computes the scalar `function(tensor)` for the example's tensor,
guards the result, and returns the result.
"""

aten = torch.ops.aten


def _nonzero(count: Count, x: Tensor) -> Tensor:
    return aten.nonzero_static(x, size=count(torch.count_nonzero, x))


def _masked_select(count: Count, x: Tensor, mask: Tensor) -> Tensor:
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    size = count(torch.count_nonzero, mask) * (math.prod(shape) // max(mask.numel(), 1))
    places = aten.nonzero_static(mask.expand(shape).reshape(-1), size=size)
    return x.expand(shape).reshape(-1).index_select(0, places.select(1, 0))


def _index(count: Count, x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    found: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            found += _nonzero(count, index).unbind(1)
        else:
            found.append(index)
    return aten.index.Tensor(x, found)


def _repeat_interleave(count: Count, repeats: Tensor, *, output_size: int | None = None) -> Tensor:
    return aten.repeat_interleave.Tensor(repeats, output_size=count(torch.sum, repeats))


def _sorted(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sorted elements of `x`, and the index of each in the flattened `x`.

    The third result is a mask, true for the first of equal elements.
    """
    values, order = x.reshape(-1).sort(stable=True)
    is_first = torch.cat([values.new_ones(min(len(values), 1), dtype=torch.bool), values[1:] != values[:-1]])
    return values, order, is_first


def _unique(
    count: Count, x: Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    values, order, is_first = _sorted(x)
    size = count(lambda tensor: _sorted(tensor)[2].sum(), x)
    firsts = aten.nonzero_static(is_first, size=size).select(1, 0)
    empty = firsts.new_empty(0)
    ranks = is_first.cumsum(0) - 1
    inverse = torch.empty_like(order).scatter(0, order, ranks).view(x.shape) if return_inverse else empty
    counts = firsts.new_zeros(len(firsts)).index_add(0, ranks, torch.ones_like(ranks)) if return_counts else empty
    return values.index_select(0, firsts), inverse, counts


def _starts(rows: Tensor) -> Tensor:
    """Return a mask [N] of the rows [N, ...] that differ from the previous row."""
    differs = (rows[1:] != rows[:-1]).flatten(1).any(1) if rows.dim() > 1 else rows[1:] != rows[:-1]
    return torch.cat([differs.new_ones(min(len(rows), 1)), differs])


def _runs(count: Count, rows: Tensor, of: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Find the runs of equal consecutive rows among `rows` [N, ...], which equal `of(x)`.

    `count` takes `x`, because the example's values of `x` are known, and those of `rows` are not.

    Returns:
        The first row of each run [runs, ...], the number of each row's run [N], and each run's number of rows [runs].
    """
    starts = _starts(rows)
    size = count(lambda tensor: _starts(of(tensor)).sum(), x)
    firsts = aten.nonzero_static(starts, size=size).select(1, 0)
    ranks = starts.cumsum(0) - 1
    return rows.index_select(0, firsts), ranks, firsts.new_zeros(size).index_add(0, ranks, torch.ones_like(ranks))


def _unique_consecutive(
    count: Count, x: Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    def of(tensor: Tensor) -> Tensor:
        return tensor.reshape(-1) if dim is None else tensor.movedim(dim, 0)

    rows, ranks, counts = _runs(count, of(x), of, x)
    empty = ranks.new_empty(0)
    inverse = ranks.view(x.shape) if dim is None else ranks
    return (
        rows if dim is None else rows.movedim(0, dim),
        inverse if return_inverse else empty,
        counts if return_counts else empty,
    )


def _order(rows: Tensor) -> Tensor:
    """Return the indices [N] that sort `rows` [N, ...] by first element, equal rows by second element, and so on."""
    flat = rows.flatten(1)
    order = torch.arange(len(rows), device=rows.device)
    for column in reversed(range(flat.shape[1])):
        order = order[flat[order, column].argsort(stable=True)]
    return order


def _unique_dim(
    count: Count, x: Tensor, dim: int, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    def of(tensor: Tensor) -> Tensor:
        rows = tensor.movedim(dim, 0)
        return rows[_order(rows)]

    order = _order(x.movedim(dim, 0))
    rows, ranks, counts = _runs(count, x.movedim(dim, 0)[order], of, x)
    empty = ranks.new_empty(0)
    inverse = torch.empty_like(order).scatter(0, order, ranks) if return_inverse else empty
    return rows.movedim(0, dim), inverse, counts if return_counts else empty


def _bincount(count: Count, x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    size = max(minlength, count(lambda tensor: tensor.max().long() + 1, x) if x.numel() else 0)
    if weights is None:
        counts, addends = torch.zeros(size, dtype=torch.int64, device=x.device), torch.ones_like(x, dtype=torch.int64)
    else:
        addends = weights if weights.dtype == torch.float32 else weights.double()
        counts = torch.zeros(size, dtype=addends.dtype, device=x.device)
    return counts.index_add(0, x.long(), addends)


COUNTED: Mapping[Any, Callable[..., Any]] = {
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _masked_select,
    aten.index.Tensor: _index,
    aten.repeat_interleave.Tensor: _repeat_interleave,
    aten._unique2.default: _unique,
    aten.unique_consecutive.default: _unique_consecutive,
    aten.unique_dim.default: _unique_dim,
    aten.bincount.default: _bincount,
}
"""Operator → function `f(count, *args)` that computes its result with the number of rows from `count`."""


def is_counted(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the shape of an operator's result depends on the values of these operands."""
    if operator is aten.index.Tensor:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if operator is aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    return operator in COUNTED
