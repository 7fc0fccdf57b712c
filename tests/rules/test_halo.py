"""Halo exchange extends pieces to pieces of the padded whole, and returns gradients to their owners."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.fx.proxy import GraphAppendingTracer

from autoshard.ir.boundary import shard
from autoshard.ir.mesh import Mesh
from autoshard.ir.spec import P
from autoshard.rules.halo import HaloWindow, exchanged, extend_all, fold_all, inner_padding, sliding, stride_factors
from autoshard.rules.local import LocalContext
from autoshard.rules.notation import Rule, bind
from autoshard.runtime.simulator import simulate

MESH = Mesh({"a": 2, "b": 3})
OVER_ALL = ({"o1": ("a", "b")}, {"o2": ("b",), "o1": ("a",)}, {"o2": ("a", "b")})
"""Splits over both axes, which give each rank a different piece."""


@st.composite
def windows(draw: st.DrawFn) -> tuple[HaloWindow, ...]:
    """Draw windows along two dims, with halos no larger than the pieces of six ranks."""
    found = []
    for dim in (-2, -1):
        stride, kernel, padding, dilation = (draw(st.integers(low, 3)) for low in (1, 1, 0, 1))
        count = 6 * draw(st.integers(1, 2))
        window = HaloWindow(dim, count * stride, count, kernel, stride, padding, dilation)
        assume(window.halo.right > -stride and window.halo.least <= count // 6)
        found.append(window)
    return tuple(found)


def _run(windows: tuple[HaloWindow, ...], splits: Any, value: Tensor, *, back: bool = False) -> list[Tensor]:
    """Return each rank's piece of `value`, extended by its halo with -1 as padding; or each rank's folded gradient."""
    sides = ((tuple(w.elements for w in windows),), (tuple(w.windows for w in windows),))
    rule = Rule(sides, sizes=stride_factors(windows), blocked=tuple(stride_factors(windows)))
    shape = tuple(window.size for window in windows)
    bound = bind(rule, [shape], [tuple(window.count for window in windows)])
    graph = fx.Graph()
    tracer = GraphAppendingTracer(graph)
    context = LocalContext(None, bound, splits, MESH, tracer)
    halos = [window.halo for window in windows if window.factor in splits]
    operand = fx.Proxy(graph.placeholder("operand"), tracer)
    result = fold_all(context, operand, halos) if back else extend_all(context, operand, halos, -1)
    graph.output((result.node,))
    spec, ranks = P(*(splits.get(window.factor) for window in windows)), range(MESH.size)
    pieces = [_weights(windows, splits, rank) if back else shard(value, spec, MESH, rank) for rank in ranks]
    return simulate(fx.GraphModule(torch.nn.Module(), graph), MESH, [pieces])[0]


def _weights(windows: tuple[HaloWindow, ...], splits: Any, rank: int) -> Tensor:
    """The gradient of a rank's extended piece, with other numbers on each rank."""
    shape = [stop - start for start, stop in _ranges(windows, splits, rank)]
    return torch.arange(1.0, 1 + shape[0] * shape[1]).reshape(shape) * (rank + 1)


def _ranges(windows: tuple[HaloWindow, ...], splits: Any, rank: int) -> list[tuple[int, int]]:
    """Return the start and the stop along each dim of the elements that a rank's windows read."""
    place, found = MESH.coordinates(rank), []
    for window in windows:
        axes = splits.get(window.factor, ())
        if not axes:
            found.append((0, window.size))
            continue
        index = 0
        for axis in axes:
            index = index * MESH.axis_size(axis) + place[axis]
        count = window.count // MESH.shards(axes)
        first, last = index * count, (index + 1) * count - 1
        start = first * window.stride - window.padding
        found.append((start, last * window.stride - window.padding + window.extent))
    return found


def _padded(value: Tensor) -> Tensor:
    return torch.nn.functional.pad(value, (20, 20, 20, 20), value=-1)


@given(windows=windows(), splits=st.sampled_from([*OVER_ALL, {"o1": ("a",)}, {"o2": ("b",)}]))
def test_pieces_are_extended_by_what_their_windows_read(windows: tuple[HaloWindow, ...], splits: Any) -> None:
    """Each rank's extended piece equals the part of the padded whole that its windows read, corners included."""
    value = torch.arange(float(windows[0].size * windows[1].size)).reshape(windows[0].size, windows[1].size)
    for rank, piece in enumerate(_run(windows, splits, value)):
        (top, bottom), (left, right) = _ranges(windows, splits, rank)
        assert torch.equal(piece, _padded(value)[top + 20 : bottom + 20, left + 20 : right + 20])


@given(windows=windows(), splits=st.sampled_from(OVER_ALL))
def test_gradients_are_added_where_elements_came_from(windows: tuple[HaloWindow, ...], splits: Any) -> None:
    """Folding gives each element the sum of the gradients of all ranks that read the element."""
    whole = _padded(torch.zeros(windows[0].size, windows[1].size)) * 0
    for rank in range(MESH.size):
        (top, bottom), (left, right) = _ranges(windows, splits, rank)
        whole[top + 20 : bottom + 20, left + 20 : right + 20] += _weights(windows, splits, rank)
    spec = P(*(splits.get(window.factor) for window in windows))
    for rank, piece in enumerate(_run(windows, splits, whole, back=True)):
        assert torch.equal(piece, shard(whole[20:-20, 20:-20], spec, MESH, rank))


def test_what_a_rule_says_of_windows() -> None:
    """Windows of three need one neighbouring element at each side, and adjacent windows of two need none."""
    (wide,) = sliding((8,), (8,), (3,), (1,), (1,))
    assert (wide.halo.left, wide.halo.right) == (1, 1)
    assert exchanged([wide.halo]) == {"o1": 1}
    (side_by_side,) = sliding((8,), (4,), (2,), (2,), (0,))
    assert exchanged([side_by_side.halo]) == {}
    assert stride_factors([side_by_side]) == {"s1": 2}
    (far,) = sliding((32,), (16,), (9,), (2,), (4,))
    assert far.halo.least == 2
    (narrower,) = sliding((8,), (6,), (3,), (1,), (0,))
    assert not narrower.fits
    assert inner_padding((2, 1), 2, [wide.halo]) == [2, 0]
