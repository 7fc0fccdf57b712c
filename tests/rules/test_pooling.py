"""Pooling splits batch and channels, and splits space into pieces that exchange their edges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.nn import functional as F

from autoshard.ir.mesh import Mesh
from autoshard.rules import strategies
from autoshard.rules.registry import bound_rule
from tests.rules.recording import check_call, check_database, check_recorded, check_splits, tensor
from tests.rules.run_strategy import results_of

aten = torch.ops.aten
MESHES = (Mesh({"a": 2}), Mesh({"a": 2, "b": 2}))


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("function", "space"),
    [
        (lambda x: F.max_pool1d(x, 2), 1),
        (lambda x: F.max_pool2d(x, 2), 2),
        (lambda x: F.max_pool2d(x, 3, 2, 1), 2),
        (lambda x: F.max_pool3d(x, 2), 3),
        (lambda x: F.avg_pool1d(x, 3, 1, 1), 1),
        (lambda x: F.avg_pool2d(x, 2), 2),
        (lambda x: F.avg_pool3d(x, 2), 3),
        (lambda x: F.adaptive_avg_pool2d(x, 3), 2),
        (lambda x: F.adaptive_avg_pool2d(x, 2), 2),
        (lambda x: F.adaptive_max_pool2d(x, 2), 2),
        (lambda x: F.adaptive_max_pool3d(x, (2, 1, 3)), 3),
    ],
)
def test_planes(function: Callable[[torch.Tensor], torch.Tensor], space: int) -> None:
    """Under every strategy, the results and gradients of a pooling operator equal one device's."""
    x = torch.randn(2, 8, *[4] * space, dtype=torch.float64, requires_grad=True)
    assert check_recorded(lambda: function(x))


@st.composite
def pools(draw: st.DrawFn) -> tuple[list[int], tuple[list[int], ...]]:
    """Draw sizes of a plane, and kernel, stride, padding and dilation of fitting windows."""
    sizes, options = [], []
    for _ in range(2):
        stride, kernel, dilation = (draw(st.integers(1, 3)) for _ in range(3))
        least = -(-(dilation * (kernel - 1) + 1) // (4 * stride))  # a window fits
        sizes.append(4 * draw(st.integers(least, 2)) * stride)
        options.append((kernel, stride, draw(st.integers(0, kernel // 2)), dilation))
    kernel, stride, padding, dilation = map(list, zip(*options, strict=True))
    return sizes, (kernel, stride, padding, dilation)


@given(pool=pools(), ceil_mode=st.booleans(), lowest=st.booleans())
def test_maxima(pool: tuple[list[int], tuple[list[int], ...]], ceil_mode: bool, lowest: bool) -> None:
    """Under every strategy, maxima, their indices and gradients equal one device's, even for windows of -inf."""
    sizes, options = pool
    x = tensor(3, 1, *sizes)
    if lowest:
        x[..., : sizes[1] // 2] = -torch.inf
    values, indices = aten.max_pool2d_with_indices(x, *options, ceil_mode)
    check_call(aten.max_pool2d_with_indices.default, x, *options, ceil_mode, meshes=MESHES)
    grad = tensor(*values.shape)
    op = aten.max_pool2d_with_indices_backward.default
    check_call(op, grad, x, *options, ceil_mode, indices, meshes=MESHES)


@given(pool=pools(), ceil_mode=st.booleans(), counts=st.booleans(), divisor=st.sampled_from([None, 5]))
def test_averages(
    pool: tuple[list[int], tuple[list[int], ...]], ceil_mode: bool, counts: bool, divisor: int | None
) -> None:
    """Under every strategy, averages of drawn windows and their gradients equal one device's, for any divisor."""
    sizes, (kernel, stride, padding, _) = pool
    x, options = tensor(2, 1, *sizes), (kernel, stride, padding, ceil_mode, counts, divisor)
    check_call(aten.avg_pool2d.default, x, *options, meshes=MESHES)
    grad = tensor(*aten.avg_pool2d(x, *options).shape)
    check_call(aten.avg_pool2d_backward.default, grad, x, *options, meshes=MESHES)


@given(sizes=st.tuples(*[st.integers(1, 8)] * 2), counts=st.tuples(*[st.integers(1, 4)] * 2))
def test_adaptive(sizes: tuple[int, int], counts: tuple[int, int]) -> None:
    """Under every strategy, adaptive pools of drawn sizes and their gradients equal one device's."""
    assume(all(count <= size for count, size in zip(counts, sizes, strict=True)))
    x, grad = tensor(2, 1, *sizes), tensor(2, 1, *counts)
    indices = aten.adaptive_max_pool2d(x, counts)[1]
    check_splits(aten.adaptive_max_pool2d.default, x, counts, meshes=MESHES)
    check_splits(aten.adaptive_max_pool2d_backward.default, grad, x, indices, meshes=MESHES)
    check_splits(aten._adaptive_avg_pool2d.default, x, counts, meshes=MESHES)
    check_splits(aten._adaptive_avg_pool2d_backward.default, grad, x, meshes=MESHES)


def _is_split(op: Any, *args: Any) -> bool:
    """Whether two ranks may split the last dim of the first operand."""
    return any(inputs[0].is_shard(args[0].dim() - 1) for inputs, _ in strategies(op, args, {}, 2))


def _exchanged(op: Any, *args: Any) -> dict[str, int]:
    rule = bound_rule(op, args, {}, results_of(op, args, {}))
    assert rule is not None
    return dict(rule.exchanged)


def test_which_planes_are_cut() -> None:
    """Space is split only if each piece has whole windows, and all averages have one divisor."""
    x = tensor(1, 1, 4, 8)
    assert _is_split(aten.avg_pool2d.default, x, [3, 3], [1, 1], [1, 1])
    assert not _is_split(aten.avg_pool2d.default, x, [3, 3], [1, 1], [1, 1], False, False)
    assert _is_split(aten.avg_pool2d.default, x, [3, 3], [1, 1], [1, 1], False, False, 9)
    assert not _is_split(aten.avg_pool2d.default, x, [3, 3], [2, 2], [0, 0], True)
    assert not _is_split(aten.max_pool2d_with_indices.default, x, [3, 3], [1, 1])
    assert not _is_split(aten._adaptive_avg_pool2d.default, x, [4, 3])


def test_windows_side_by_side_exchange_nothing() -> None:
    """Adjacent windows need no elements of neighbours, and overlapping windows do."""
    x = tensor(1, 1, 8, 8)
    assert _exchanged(aten.max_pool2d_with_indices.default, x, [2, 2]) == {}
    assert _exchanged(aten.max_pool2d_with_indices.default, x, [2, 3], [2, 2], [0, 1]) == {"o1": 1}


def test_pieces_are_no_smaller_than_halos() -> None:
    """A halo of four elements allows pieces of four elements on two ranks, and forbids pieces of two on four ranks."""
    args = (tensor(1, 1, 4, 8), [1, 9], [1, 1], [0, 4])
    split = [len(strategies(aten.avg_pool2d.default, args, {}, ranks)) for ranks in (2, 4)]
    assert split[0] == split[1] + 1


def test_on_the_samples_of_pytorch() -> None:
    """On PyTorch's samples of pooling, every strategy has one device's results, forward and backward."""
    names = ["max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool2d",
             "adaptive_max_pool2d"]  # fmt: skip
    tally = check_database([f"nn.functional.{name}" for name in names], meshes=(Mesh({"a": 2}), Mesh({"a": 3})))
    assert not tally.failures, "\n".join(tally.failures)
    assert tally.calls > 20
