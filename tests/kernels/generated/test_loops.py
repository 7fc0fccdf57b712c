"""Loops of generated kernels, found from shapes: views split axes, adjacent dims join, and groups without common
axes are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoshard.kernels.generated.group import Group, GroupStep, Ref, ValueShape
from autoshard.kernels.generated.loops import NoLoopsError, find_loops

_aten = torch.ops.aten


def _value(*shape: int, order: tuple[int, ...] | None = None) -> ValueShape:
    tensor = torch.empty(shape)
    return ValueShape.of(tensor if order is None else tensor.permute(order))


def _step(target: Any, *args: Any, shape: tuple[int, ...]) -> GroupStep:
    return GroupStep(target, args, (), _value(*shape))


def test_pointwise_calls_on_contiguous_tensors_have_one_axis() -> None:
    """Dims that are adjacent in all tensors form one axis: [4, 6, 8] becomes 192."""
    add = _step(_aten.add.Tensor, Ref(0), Ref(1), shape=(4, 6, 8))
    loops = find_loops(Group((_value(4, 6, 8), _value(4, 6, 8)), (add,), (2,)))
    assert (loops.rows, loops.columns) == ((192,), ())
    assert loops.strides == {0: (1,), 1: (1,), 2: (1,)}


def test_a_broadcast_operand_has_no_stride_along_what_it_lacks() -> None:
    """In [4, 6, 8] + [6, 1] every dim is an axis, and the second operand has stride 0 along the first and the last."""
    add = _step(_aten.add.Tensor, Ref(0), Ref(1), shape=(4, 6, 8))
    loops = find_loops(Group((_value(4, 6, 8), _value(6, 1)), (add,), (2,)))
    assert loops.rows == (4, 6, 8)
    assert loops.strides[1] == (0, 1, 0)


def test_sums_are_columns() -> None:
    """The dim that is summed becomes the columns, also between other dims, and a view's first dim is split."""
    view = _step(_aten.view.default, Ref(0), (4, 6, 8), shape=(4, 6, 8))
    total = _step(_aten.sum.dim_IntList, Ref(1), (1,), shape=(4, 8))
    loops = find_loops(Group((_value(24, 8),), (view, total), (2,)))
    assert (loops.rows, loops.columns) == ((4, 8), (6,))
    assert loops.strides == {0: (48, 1, 8), 2: (8, 1, 0)}
    assert loops.spans[2] == (True, False)


def test_turned_tensors_keep_their_strides() -> None:
    """An operand that lies in another order keeps its own strides."""
    add = _step(_aten.add.Tensor, Ref(0), Ref(1), shape=(4, 6))
    loops = find_loops(Group((_value(4, 6), _value(6, 4, order=(1, 0))), (add,), (2,)))
    assert loops.rows == (4, 6)
    assert loops.strides[1] == (1, 4)


@pytest.mark.parametrize(
    ("group", "reason"),
    [
        (
            Group(
                (_value(6, 6),),
                (_step(_aten.t.default, Ref(0), shape=(6, 6)), _step(_aten.add.Tensor, Ref(0), Ref(1), shape=(6, 6))),
                (2,),
            ),
            "at two of its positions",
        ),
        (
            Group(
                (_value(6, 6),),
                (
                    _step(_aten.sum.dim_IntList, Ref(0), (0,), True, shape=(1, 6)),
                    _step(_aten.sum.dim_IntList, Ref(0), (1,), True, shape=(6, 1)),
                ),
                (1, 2),
            ),
            "different dims",
        ),
        (
            Group(
                (_value(6, 4), _value(4, 6)),
                (
                    _step(_aten.view.default, Ref(0), (4, 6), shape=(4, 6)),
                    _step(_aten.add.Tensor, Ref(2), Ref(1), shape=(4, 6)),
                    _step(_aten.exp.default, Ref(0), shape=(6, 4)),
                ),
                (3, 4),
            ),
            "splits 6 elements across groups of 4",
        ),
        (
            Group(
                (_value(6), _value(4)),
                (_step(_aten.neg.default, Ref(0), shape=(6,)), _step(_aten.neg.default, Ref(1), shape=(4,))),
                (2, 3),
            ),
            "no value varies along all axes",
        ),
        (
            Group(
                (_value(6), _value(4, 6)),
                (_step(_aten.neg.default, Ref(0), shape=(6,)), _step(_aten.mul.Tensor, Ref(2), Ref(1), shape=(4, 6))),
                (2, 3),
            ),
            "a result has fewer rows",
        ),
        (Group((_value(0, 4),), (_step(_aten.neg.default, Ref(0), shape=(0, 4)),), (1,)), "no elements"),
    ],
)
def test_what_does_not_go_together_is_refused(group: Group, reason: str) -> None:
    """A group without loops raises an error with the reason."""
    with pytest.raises(NoLoopsError, match=reason):
        find_loops(group)
