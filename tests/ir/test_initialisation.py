"""Boxes and strided views of `autoshard.ir.initialisation`, and the values that an initialisation reads."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from autoshard.ir.initialisation import Box, Initialisation, Operation, StridedView, contiguous_strides, cover

_SHAPES = st.lists(st.integers(1, 4), max_size=3).map(tuple)


@st.composite
def _boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    start = tuple(draw(st.integers(0, size - 1)) for size in shape)
    return Box(start, tuple(draw(st.integers(1, size - first)) for size, first in zip(shape, start, strict=True)))


def _strided(tensor: torch.Tensor) -> StridedView:
    return StridedView(0, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)


@given(_SHAPES, st.data())
def test_a_view_of_a_box_is_found_to_be_it(shape: tuple[int, ...], data: st.DataObject) -> None:
    """The strided view of a box is recognised as this box, also with dims of one element left out."""
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    box = data.draw(_boxes(shape))
    view = box.of(whole)
    for dim in reversed(range(len(shape))):
        if box.size[dim] == 1 and data.draw(st.booleans()):
            view = view.select(dim, 0)
    found = _strided(view).box_in(shape)
    assert found is not None
    assert torch.equal(found[0].of(whole).reshape(view.shape), view)
    assert tuple(found[0].size[dim] for dim in found[1]) == tuple(view.shape)


@given(_SHAPES, st.data())
def test_what_is_said_to_be_a_box_is_one(shape: tuple[int, ...], data: st.DataObject) -> None:
    """If `box_in` finds a box for a strided tensor, the box has the tensor's elements."""
    whole = torch.arange(torch.Size(shape).numel())
    sizes = data.draw(st.lists(st.integers(1, 4), max_size=3))
    room, strides = whole.numel() - 1, []
    for size in sizes:
        strides.append(data.draw(st.integers(0, min(8, room // (size - 1)) if size > 1 else 8)))
        room -= (size - 1) * strides[-1]
    view = whole.as_strided(sizes, strides, data.draw(st.integers(0, room)))
    found = _strided(view).box_in(shape)
    if found is not None:
        assert torch.equal(found[0].of(whole.view(shape)).reshape(view.shape), view)


@given(_SHAPES, st.permutations(range(3)))
def test_a_transposed_tensor_has_all_of_its_memory(shape: tuple[int, ...], order: list[int]) -> None:
    whole = torch.zeros(shape)
    view = whole.permute([dim for dim in order if dim < len(shape)])
    assert contiguous_strides(shape) == whole.stride()
    assert _strided(whole).is_in_order(whole.numel())
    assert _strided(view).has_all(whole.numel())
    if whole.numel() > 1:
        assert not _strided(view.reshape(-1)[1:]).has_all(whole.numel())


@given(_SHAPES, st.data())
def test_boxes_cover_what_they_write(shape: tuple[int, ...], data: st.DataObject) -> None:
    boxes = data.draw(st.lists(_boxes(shape), max_size=4))
    written = torch.zeros(shape, dtype=torch.bool)
    for box in boxes:
        box.of(written).fill_(True)
    assert cover(boxes, shape) == bool(written.all())


def test_a_weight_that_is_written_row_by_row_has_no_source() -> None:
    """A weight that 4000 rows write depends on no earlier value. If one row is left out, it depends on its own
    earlier value."""
    weight = StridedView(0, (4000, 8), (8, 1), 0, torch.float32)
    rows = [StridedView(0, (8,), (1,), 8 * row, torch.float32) for row in range(4000)]
    fill = torch.ops.aten.fill_.Scalar
    written = tuple(Operation(fill, (row, 1.0), {}, (None,), (row,)) for row in rows)
    assert Initialisation(written, {0: 32000}, {"w": weight}, {"w": weight}, {}, 1).sources() == {"w": frozenset()}
    assert Initialisation(written[1:], {0: 32000}, {"w": weight}, {"w": weight}, {}, 1).sources() == {
        "w": frozenset({"w"})
    }


@given(_SHAPES, st.data())
def test_what_two_boxes_share_is_in_both(shape: tuple[int, ...], data: st.DataObject) -> None:
    one, other = data.draw(_boxes(shape)), data.draw(_boxes(shape))
    marks = [torch.zeros(shape, dtype=torch.bool) for _ in range(3)]
    for box, mark in zip((one, other, one.meet(other)), marks, strict=True):
        if box.numel:
            box.of(mark).fill_(True)
    assert torch.equal(marks[0] & marks[1], marks[2])
