"""Follow padding through calls that look up elements by index, return an index, or scan a dim.

Without padding, all indices are assumed to be valid. Indices into a padded dim must not be negative, because index -1
selects another element with padding than without.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from autoshard.ir.spec import Reduction
from passes.padding.by_rule import by_rule, changes_nothing
from passes.padding.contents import PaddedContent, content_of_type, either
from passes.padding.padded_calls import PaddedCall, Results, padded_call
from passes.padding.padded_values import CLEAN, Dim, PaddedValue, ReachedError, Region

aten = torch.ops.aten


@padded_call(aten.embedding.default)
def _embedding(call: PaddedCall) -> Results:
    """Return the `PaddedValue` of rows that are looked up in a table.

    Raises:
        ReachedError: an index in padding lies beyond the table, which would crash.
    """
    table, indices = call.operands[0], call.operands[1]
    rows = table.shape(0)[0]
    for region, content in indices.contents.items():
        if region and content.low >= 0 and rows <= content.high < _UNBOUNDED:
            raise ReachedError(f"looks up row {content.high:.0f} for padding, in a table of {rows} rows")
    return by_rule(call)


_UNBOUNDED = 2.0**62
"""An upper bound of indices that is at least this large counts as unknown."""


@padded_call(aten.index.Tensor, aten._unsafe_index.Tensor)
def _index(call: PaddedCall) -> Results:
    """Return the `PaddedValue` of `x[index, ...]`.

    The result has the dims of the broadcast index tensors, and the dims of `x` that are not indexed.

    Raises:
        ReachedError: a mask selects the elements, or an index may count from the end of a padded dim.
    """
    x = call.operands[0]
    nodes: Sequence[Any] = call.argument(1, "indices")
    if not call.is_padded:
        return by_rule(call)
    if any(node is not None and node.meta["val"].dtype in (torch.bool, torch.uint8) for node in nodes):
        raise ReachedError("takes elements by a mask")
    indices = {dim: call.values[node] for dim, node in enumerate(nodes) if node is not None}
    index_dims = _broadcast(list(indices.values()))
    present = sorted(indices)
    are_adjacent = present == [*range(present[0], present[-1] + 1)]
    before = [dim for dim in range(len(x.dims)) if dim not in indices and are_adjacent and dim < present[0]]
    behind = [dim for dim in range(len(x.dims)) if dim not in indices and dim not in before]
    first, last = len(before), len(before) + len(index_dims)
    dims = [*(x.dims[dim] for dim in before), *index_dims, *(x.dims[dim] for dim in behind)]

    def content(region: Region) -> PaddedContent:
        kept = {
            (before[dim] if dim < first else behind[dim - last], part)
            for dim, part in region
            if not first <= dim < last
        }
        return _looked_up(
            x, frozenset(kept), {dim: _at(index, region, first, len(index_dims)) for dim, index in indices.items()}
        )

    return (PaddedValue.of(dims, content),)


def _at(index: PaddedValue, region: Region, first: int, rank: int) -> tuple[PaddedContent, bool]:
    """Return the content of an index tensor in a region of the result, and whether the region is the clean part.

    The result's `rank` dims from number `first` on come from the index tensors.
    """
    shift = first + rank - len(index.dims)
    of_index = {(dim - shift, part) for dim, part in region}
    return index.content(of_index & {*index.places}), not region


def _looked_up(x: PaddedValue, kept: Region, indices: dict[int, tuple[PaddedContent, bool]]) -> PaddedContent:
    """Return the content of the elements of `x` that are looked up at some indices.

    `kept` is the region of `x` in the dims that are not indexed. `indices` maps each indexed dim to the content of its
    index, and whether the elements go to the clean part of the result.
    """
    regions = [kept]
    for dim, (index, is_clean) in indices.items():
        if not x.is_dim_padded(dim):
            continue
        size, exact = x.plain_part(dim)
        if is_clean:
            _check_from_start(index)
            continue
        if index.lies_in(exact, size - 1):
            regions = [region | {(dim, 0)} for region in regions]
        elif not index.lies_in(0, exact - 1):
            regions = [*regions, *(region | {(dim, 0)} for region in regions)]
    # Padding looks up other elements than the clean part.
    return replace(either(map(x.content, regions)), is_clean=False, is_like_clean=False)


def _check_from_start(index: PaddedContent) -> None:
    if index.low < 0:
        raise ReachedError("takes elements of the padded dim at indices that may count from its end")


def _broadcast(indices: Sequence[PaddedValue]) -> list[Dim]:
    rank = max(len(index.dims) for index in indices)
    result: list[Dim] = [((1, 1),)] * rank
    for index in indices:
        for dim, parts in enumerate(index.dims, start=rank - len(index.dims)):
            if math.prod(size for size, _ in parts) == 1:
                continue
            if math.prod(size for size, _ in result[dim]) != 1 and result[dim] != parts:
                raise ReachedError("takes the padded dim and another one for the same")
            result[dim] = parts
    return result


@padded_call(aten.index_select.default)
def _index_select(call: PaddedCall) -> Results:
    x, index = call.operands
    dim = call.argument(1, "dim") % max(len(x.dims), 1)
    if not x.is_dim_padded(dim):
        return by_rule(call)
    dims = (*x.dims[:dim], index.dims[0] if index.dims else ((1, 1),), *x.dims[dim + 1 :])

    def content(region: Region) -> PaddedContent:
        along = frozenset(place for place in region if place[0] == dim)
        found = index.content((0, part) for _, part in along)
        return _looked_up(x, region - along, {dim: (found, not region)})

    return (PaddedValue.of(dims, content),)


@padded_call(aten.gather.default)
def _gather(call: PaddedCall) -> Results:
    x, index = call.operands
    dim = call.argument(1, "dim") % max(len(x.dims), 1)
    if not x.is_dim_padded(dim):
        return by_rule(call)
    others = [place for place in range(len(x.dims)) if place != dim]
    if any(
        x.dims[place] != index.dims[place] for place in others if x.is_dim_padded(place) or index.is_dim_padded(place)
    ):
        raise ReachedError("takes the padded dim and another one for the same")

    def content(region: Region) -> PaddedContent:
        kept = frozenset(place for place in region if place[0] != dim)
        return _looked_up(x, kept, {dim: (index.content(region), not region)})

    return (PaddedValue.of(index.dims, content),)


# Indices of extremes: the first of several.


@padded_call(aten.argmax.default, aten.argmin.default)
def _arg_extreme(call: PaddedCall) -> Results:
    (found,) = _extremes(call)
    return (found,)


@padded_call(aten.max.dim, aten.min.dim)
def _extreme(call: PaddedCall) -> Results:
    return _extremes(call)


def _extremes(call: PaddedCall) -> Results:
    """Return the `PaddedValue`s of a call of max, min, argmax or argmin along a dim.

    Raises:
        ReachedError: an element in padding could be chosen.
    """
    (x,) = call.operands
    dim = call.argument(1, "dim")
    if dim is None and x.is_padded:
        raise ReachedError("needs all of the padded dim")
    if dim is None or not x.is_dim_padded(dim := dim % max(len(x.dims), 1)):
        return by_rule(call)
    part = x.plain_part(dim)
    clean, padding = x.content(CLEAN), x.content({(dim, 0)})
    reduction = Reduction.MAX if call.target in (aten.argmax.default, aten.max.dim) else Reduction.MIN
    if not changes_nothing(reduction, None, padding, clean):
        raise ReachedError("takes padding into its result")
    keepdim = call.argument(2, "keepdim", False)
    dims = (*x.dims[:dim], *([((1, 1),)] if keepdim else []), *x.dims[dim + 1 :])
    moved = 0 if keepdim else 1

    def origin(region: Region) -> Region:
        return frozenset((place + (moved if place >= dim else 0), index) for place, index in region)

    def place_of(region: Region) -> PaddedContent:
        return PaddedContent(0, (part[1] if not region else part[0]) - 1, is_finite=True)

    def value_of(region: Region) -> PaddedContent:
        return either((x.content(origin(region)), x.content(origin(region) | {(dim, 0)})))

    index = PaddedValue.of(dims, place_of)
    if call.target in (aten.argmax.default, aten.argmin.default):
        return (index,)
    return (PaddedValue.of(dims, value_of), index)


@padded_call(
    aten.cumsum.default, aten.cumprod.default, aten.cummax.default, aten.cummin.default, aten.logcumsumexp.default
)
def _scan(call: PaddedCall) -> Results:
    """Return the `PaddedValue`s of a scan such as `cumsum`.

    Padding changes no clean element: each element depends only on earlier elements, and padding comes last.
    """
    (x,) = call.operands
    dim = call.argument(1, "dim") % max(len(x.dims), 1)
    if not x.is_padded or not x.is_dim_padded(dim):
        return by_rule(call)
    x.plain_part(dim)

    def result(number: int) -> PaddedValue:
        value = call.node.meta["val"]
        value = value[number] if isinstance(value, (tuple, list)) else value
        made = content_of_type(value.dtype)

        def content(region: Region) -> PaddedContent:
            found = either((x.content(region), x.content(region - {(dim, 0)})))
            if call.target in _EXTREME_SCANS and not number:
                return found
            if call.target is aten.cumsum.default and found.low >= 0:
                return PaddedContent(0, math.inf if value.is_floating_point() else made.high, found.is_finite)
            return PaddedContent(made.low, made.high, found.is_finite)

        return PaddedValue.of(x.dims, content)

    return tuple(result(number) for number in range(len(call.shapes(0))))


_EXTREME_SCANS = (aten.cummax.default, aten.cummin.default)
"""Scans whose first result has, at each index of the dim, the largest or smallest element up to this index."""
