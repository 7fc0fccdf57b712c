"""Follow padding through calls that create tensors or move elements: views, slices, concatenations, triangles.

Each operator has a function that returns the `PaddedValue`s of a call's results: where padding is, and which numbers it
may contain. The functions compute no tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autoshard.tracing.bounded import CREATIONS
from passes.padding.contents import UNKNOWN, PaddedContent, constant, content_of_call, either
from passes.padding.padded_calls import PaddedCall, Results, padded_call
from passes.padding.padded_values import (
    CLEAN,
    Dim,
    PaddedValue,
    Part,
    Place,
    ReachedError,
    Region,
    is_padded_part,
    joined,
)

aten = torch.ops.aten


# Created tensors.

_EMPTY = (aten.empty.memory_format, aten.new_empty.default)
_FILLED = tuple(target for target in CREATIONS if target not in (aten.arange.default, aten.arange.start))


def _filled(call: PaddedCall) -> Results:
    """Return the `PaddedValue` of a new tensor whose elements all equal one number, or are not initialised."""
    made = UNKNOWN if call.target in _EMPTY else content_of_call(call.node, [x.content(CLEAN) for x in call.operands])
    return (PaddedValue.of(call.plain_dims(), lambda _: made),)


for _target in _FILLED:
    padded_call(_target, sizes=(CREATIONS[_target],))(_filled)


@padded_call(aten.arange.default, sizes=(0,))
@padded_call(aten.arange.start, sizes=(1,))
@padded_call(aten.arange.start_step, sizes=(1,))
def _arange(call: PaddedCall) -> Results:
    """Return the `PaddedValue` of an `arange`. Its clean part is the range of the exact program."""
    args = call.node.args
    start, step = (0, 1) if len(args) == 1 else (args[0], args[2] if len(args) > 2 else 1)
    assert isinstance(start, int | float)
    assert isinstance(step, int | float)
    (dim,) = call.plain_dims()
    ((padded, exact),) = dim

    def content(region: Region) -> PaddedContent:
        first, last = (exact, padded - 1) if region else (0, exact - 1)
        ends = (start + first * step, start + last * step)
        return PaddedContent(min(ends), max(ends), is_finite=True)

    return (PaddedValue.of([dim], content),)


# Shapes.


@padded_call(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.view_copy.default, sizes=(1,))
@padded_call(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.flatten.using_ints)
def _view(call: PaddedCall) -> Results:
    """Return the `PaddedValue` of a view that merges or splits dims.

    Raises:
        ReachedError: the view splits a padded part of a dim.
    """
    (x,) = call.operands
    if all(0 in call.shapes(index)[0] for index in (0, 1)):
        return (PaddedValue.of(call.plain_dims(), lambda _: constant(0)),)  # there are no elements
    waiting = _waiting_parts(x)
    dims: list[Dim] = []
    origins: dict[Place, Place] = {}
    for size in zip(call.shapes(0)[0], call.shapes(1)[0], strict=True):
        dims.append(_take(waiting, size, len(dims), origins))
    if waiting:
        raise ReachedError("splits the padded dim")

    def content(region: Region) -> PaddedContent:
        return x.content(origins[place] for place in region)

    return (PaddedValue.of(dims, content),)


def _waiting_parts(x: PaddedValue) -> list[tuple[Place, Part]]:
    """Return the place and sizes of each part of the dims of `x`, in order.

    Neighbouring parts without padding are merged.
    """
    found: list[tuple[Place, Part]] = []
    for place, part in (((dim, index), part) for dim, parts in enumerate(x.dims) for index, part in enumerate(parts)):
        if found and not is_padded_part(part) and not is_padded_part(found[-1][1]):
            size = found[-1][1][0] * part[0]
            found[-1] = (place, (size, size))
        elif part != (1, 1):
            found.append((place, part))
    return found


def _take(waiting: list[tuple[Place, Part]], size: Part, dim: int, origins: dict[Place, Place]) -> Dim:
    """Remove parts from the front of `waiting` that make up dim number `dim` of a view, and return them.

    Args:
        waiting: place and sizes of the old parts that no dim of the view has taken yet. Parts without padding may be
            split.
        size: size of the view's dim in the padded program, and in the exact program.
        dim: number of the view's dim.
        origins: receives new place → old place for each padded part.

    Raises:
        ReachedError: the view splits a padded dim, merges it in part, or leaves no element of it.
    """
    parts: list[Part] = []
    left = size
    while left != (1, 1):
        if not waiting:
            raise ReachedError("splits the padded dim")
        place, part = waiting[0]
        if 0 in (*left, *part):
            raise ReachedError("leaves no element of the padded dim")
        if not is_padded_part(part) and left[0] == left[1] and part[0] > left[0] and part[0] % left[0] == 0:
            waiting[0] = (place, (part[0] // left[0], part[0] // left[0]))
            part = left
        elif left[0] % part[0] == 0 and left[1] % part[1] == 0:
            waiting.pop(0)
        else:
            raise ReachedError("splits the padded dim, or merges it in part")
        left = (left[0] // part[0], left[1] // part[1])
        if is_padded_part(part):
            origins[dim, len(parts)] = place
        parts.append(part)
    return tuple(parts) or ((1, 1),)


@padded_call(aten.expand.default, aten.expand_copy.default, aten.repeat.default, sizes=(1,))
def _expand(call: PaddedCall) -> Results:
    """Return the `PaddedValue` of an expanded or repeated tensor.

    Raises:
        ReachedError: a padded dim is repeated.
    """
    (x,) = call.operands
    dims: list[Dim] = [(size,) for size in zip(call.shapes(0)[0], call.shapes(1)[0], strict=True)]
    new = len(dims) - len(x.dims)
    kept: dict[Place, Place] = {}
    for dim, (parts, size) in enumerate(zip(x.dims, x.shape(0), strict=True), start=new):
        if size == dims[dim][0][0]:
            dims[dim] = parts
            kept |= {(dim, index): (dim - new, index) for index in range(len(parts))}
        elif size != 1 and (is_padded_part(dims[dim][0]) or x.is_dim_padded(dim - new)):
            raise ReachedError("repeats the padded dim")

    def content(region: Region) -> PaddedContent:
        return x.content(kept[place] for place in region if place in kept)

    return (PaddedValue.of(dims, content),)


# Cuts.


@padded_call(aten.slice.Tensor, aten.slice_copy.Tensor, sizes=(2, 3))
def _slice(call: PaddedCall) -> Results:
    x, dim = _operand_and_dim(call)
    size, exact = x.plain_part(dim)
    step = call.both(4, "step", 1)[0]
    starts = [_from_start(start, length) for start, length in zip(call.both(2, "start"), (size, exact), strict=True)]
    if starts[0] != starts[1] or (step != 1 and x.is_dim_padded(dim)):
        raise ReachedError("cuts the padded dim from its end, or in steps")
    part = (call.shapes(0)[0][dim], call.shapes(1)[0][dim])
    begins_clean = starts[0] + part[1] < exact

    def content(region: Region) -> PaddedContent:
        place = (dim, 0)
        if place not in region:
            return x.content(region)
        if not x.is_dim_padded(dim):
            return x.content(region - {place})
        return joined(x, region, place) if begins_clean else x.content(region)

    return (x.replaced(dim, part, content),)


def _from_start(place: int | None, length: int) -> int:
    place = 0 if place is None else place
    return max(0, place + length) if place < 0 else min(place, length)


def _check_same(call: PaddedCall, *positions: int) -> None:
    for position in positions:
        one, other = call.both(position, "")
        if one != other:
            raise ReachedError("computes with a number that depends on the length")


@padded_call(aten.select.int, aten.select_copy.int, sizes=(2,))
def _select(call: PaddedCall) -> Results:
    x, dim = _operand_and_dim(call)
    if x.is_dim_padded(dim):
        _check_place(call, x, dim, 2)
    else:
        _check_same(call, 2)
    dims = (*x.dims[:dim], *x.dims[dim + 1 :])

    def content(region: Region) -> PaddedContent:
        return x.content((place[0] + (place[0] >= dim), place[1]) for place in region)

    return (PaddedValue.of(dims, content),)


def _check_place(call: PaddedCall, x: PaddedValue, dim: int, position: int) -> None:
    """Raise `ReachedError` if an index selects different elements in the padded program and in the exact program.

    The index is argument `position` of the call, and points into the padded dim `dim`. For example, index -1 selects
    the last element, which is padding in the padded program.
    """
    size, exact = x.plain_part(dim)
    places = [
        place + length if place < 0 else place
        for place, length in zip(call.both(position, "index"), (size, exact), strict=True)
    ]
    if places[0] != places[1]:
        raise ReachedError("takes an element of the padded dim from its end")


@padded_call(aten.select_scatter.default, sizes=(3,))
def _select_scatter(call: PaddedCall) -> Results:
    x, source = call.operands
    dim = call.argument(2, "dim") % len(x.dims)
    if x.is_dim_padded(dim):
        _check_place(call, x, dim, 3)
    else:
        _check_same(call, 3)
    if (*x.dims[:dim], *x.dims[dim + 1 :]) != source.dims:
        raise ReachedError("takes the padded dim and another one for the same")

    def content(region: Region) -> PaddedContent:
        if any(place[0] == dim for place in region):
            return x.content(region)
        written = source.content((place[0] - (place[0] > dim), place[1]) for place in region)
        return either((x.content(region), written))

    return (PaddedValue.of(x.dims, content),)


@padded_call(aten.slice_scatter.default, sizes=(3, 4))
def _slice_scatter(call: PaddedCall) -> Results:
    """Return the `PaddedValue` of `x` with `source` written into a slice of it.

    Raises:
        ReachedError: the slice lies along a padded dim, and does not reach the end of the dim.
    """
    x, source = call.operands
    dim = call.argument(2, "dim", 0) % len(x.dims)
    others = [(one, other) for place, (one, other) in enumerate(zip(x.dims, source.dims, strict=True)) if place != dim]
    if any(one != other for one, other in others):
        raise ReachedError("takes the padded dim and another one for the same")
    if not x.is_dim_padded(dim) and not source.is_dim_padded(dim):
        _check_same(call, 3, 4)
        return (PaddedValue.of(x.dims, lambda region: either((x.content(region), source.content(region)))),)
    lengths, written = x.plain_part(dim), source.plain_part(dim)
    starts = [_from_start(start, length) for start, length in zip(call.both(3, "start"), lengths, strict=True)]
    ends = [start + size for start, size in zip(starts, written, strict=True)]
    if starts[0] != starts[1] or ends != [*lengths]:
        raise ReachedError("writes into a part of the padded dim")

    def content(region: Region) -> PaddedContent:
        if (dim, 0) in region:
            return source.content(region)
        return either((x.content(region), source.content(region)))

    return (PaddedValue.of(x.dims, content),)


def _operand_and_dim(call: PaddedCall) -> tuple[PaddedValue, int]:
    x = call.operands[0]
    return x, call.argument(1, "dim", 0) % len(x.dims)


# Joins.


@padded_call(aten.cat.default)
def _cat(call: PaddedCall) -> Results:
    """Return the `PaddedValue` of a concatenation.

    Raises:
        ReachedError: a tensor follows padding along the dim, and not all its elements equal the number in that
            padding.
    """
    ranks = [len(value.dims) for value in call.operands]
    dim = call.argument(1, "dim", 0) % max(ranks)
    pieces = [value for value in call.operands if value.shape(0) != (0,) or max(ranks) == 1]
    dims = [(*value.dims[:dim], *value.dims[dim + 1 :]) for value in pieces]
    if any(other != dims[0] for other in dims):
        raise ReachedError("takes the padded dim and another one for the same")
    part = (call.shapes(0)[0][dim], call.shapes(1)[0][dim])
    first = next((i for i, value in enumerate(pieces) if value.is_dim_padded(dim)), None)
    if first is None:
        return (pieces[0].replaced(dim, part, lambda region: either(value.content(region) for value in pieces)),)
    place = (dim, 0)
    for value in pieces:
        value.plain_part(dim)
    behind = pieces[first + 1 :]

    def padding(region: Region) -> PaddedContent:
        """Return the content of the first padded tensor's padding together with all tensors behind it."""
        found = [pieces[first].content(region)]
        for value in behind:
            found.append(value.content(region - {place}))
            found += [value.content(region)] if value.is_dim_padded(dim) else []
        return either(found)

    if behind and not padding(frozenset({place})).is_constant:
        raise ReachedError("puts something behind the padded dim")

    def content(region: Region) -> PaddedContent:
        return padding(region) if place in region else either(value.content(region) for value in pieces)

    return (pieces[0].replaced(dim, part, content),)


@padded_call(aten.constant_pad_nd.default)
def _pad(call: PaddedCall) -> Results:
    """Return the `PaddedValue` of `constant_pad_nd`.

    Raises:
        ReachedError: the call adds elements behind a dim's padding, and their number differs from the padding's
            number.
    """
    (x,) = call.operands
    amounts: Sequence[int] = call.argument(1, "pad")
    number = constant(call.argument(2, "value", 0))
    dims, grown = list(x.dims), dict[int, bool]()
    for index in range(len(amounts) // 2):
        dim = len(x.dims) - 1 - index
        before, behind = amounts[2 * index], amounts[2 * index + 1]
        if before or behind:
            dims[dim] = (_grown(x, dim, before, behind, number),)
            grown[dim] = behind > 0

    def content(region: Region) -> PaddedContent:
        found = x.content(region)
        are_all_in = all((dim, 0) in region and not has_more for dim, has_more in grown.items())
        return found if are_all_in else either((found, number))

    return (PaddedValue.of(dims, content),)


def _grown(x: PaddedValue, dim: int, before: int, behind: int, number: PaddedContent) -> Part:
    size, exact = x.plain_part(dim)
    if size != exact and (before < 0 or behind < 0):
        raise ReachedError("cuts the padded dim")
    if size != exact and behind and x.content({(dim, 0)}) != number:
        raise ReachedError("puts something behind the padded dim")
    return (size + before + behind, exact + before + behind)


# Triangles.


def _triangle(call: PaddedCall, *, is_lower: bool) -> Results:
    """Return the `PaddedValue` of `tril` or `triu`, which set elements outside of a triangle to zero.

    The lower triangle has the elements with column - row <= `diagonal`, the upper triangle those with column - row >=
    `diagonal`.
    """
    (x,) = call.operands
    diagonal = call.argument(1, "diagonal", 0)
    row, column = len(x.dims) - 2, len(x.dims) - 1
    rows, columns = x.plain_part(row), x.plain_part(column)

    def ends(part: Part, *, is_padding: bool) -> tuple[int, int]:
        return (part[1], part[0] - 1) if is_padding else (0, part[1] - 1)

    def content(region: Region) -> PaddedContent:
        of_rows = ends(rows, is_padding=(row, 0) in region)
        of_columns = ends(columns, is_padding=(column, 0) in region)
        least, greatest = of_columns[0] - of_rows[1], of_columns[1] - of_rows[0]
        found = x.content(region)
        if greatest <= diagonal if is_lower else least >= diagonal:
            return found
        is_empty = least > diagonal if is_lower else greatest < diagonal
        return constant(0) if is_empty else either((found, constant(0)))

    return (PaddedValue.of(x.dims, content),)


@padded_call(aten.tril.default)
def _tril(call: PaddedCall) -> Results:
    return _triangle(call, is_lower=True)


@padded_call(aten.triu.default)
def _triu(call: PaddedCall) -> Results:
    return _triangle(call, is_lower=False)
