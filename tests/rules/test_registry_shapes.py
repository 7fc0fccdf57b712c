"""Rules of every family of operators on drawn shapes, dims and options, in float32 on two or four ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoshard.ir.mesh import Mesh
from tests.rules.recording import check_call

aten = torch.ops.aten
ours = torch.ops.autoshard

Draw = Callable[[st.SearchStrategy[Any]], Any]
Calls = Iterator[tuple[Any, tuple[Any, ...]]]

_SIZES = st.integers(1, 8)
_YES_OR_NO = st.booleans()


def _floats(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def _shape(draw: Draw, least: int = 1, most: int = 3) -> list[int]:
    return draw(st.lists(_SIZES, min_size=least, max_size=most))


def _dim(draw: Draw, ndim: int) -> int:
    return draw(st.integers(-ndim, ndim - 1))


def _some_dims(draw: Draw, ndim: int) -> list[int]:
    return draw(st.lists(st.integers(-ndim, ndim - 1), min_size=1, unique_by=lambda dim: dim % ndim))


def _maybe(draw: Draw, x: torch.Tensor) -> torch.Tensor | None:
    return x if draw(_YES_OR_NO) else None


def _indices(limit: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, limit, shape)


def _pointwise(draw: Draw) -> Calls:
    shape = _shape(draw)
    x, mask = _floats(*shape), _floats(*shape) > 0
    y = _floats(*[draw(st.sampled_from([1, size])) for size in shape[draw(st.integers(0, len(shape))) :]])
    yield draw(st.sampled_from([aten.add.Tensor, aten.mul.Tensor, aten.maximum.default, aten.lt.Tensor])), (x, y)
    yield draw(st.sampled_from([aten.relu.default, aten.neg.default, aten.erf.default, aten.sign.default])), (x,)
    yield draw(st.sampled_from([aten.mul.Scalar, aten.add.Scalar])), (x, draw(st.sampled_from([-2, 0, 0.5, 1])))
    yield aten.where.self, (mask, x, y)
    yield aten.clamp.Tensor, (x, _maybe(draw, y), y.abs())


def _matmul(draw: Draw) -> Calls:
    b, m, k, n = (draw(_SIZES) for _ in range(4))
    bias = _floats(*draw(st.sampled_from([(n,), (1, n), (m, 1), (m, n), ()])))
    yield aten.addmm.default, (bias, _floats(m, k), _floats(k, n))
    yield aten.bmm.default, (_floats(b, m, k), _floats(b, k, n))
    yield aten.linear.default, (_floats(b, m, k), _floats(n, k), _maybe(draw, _floats(n)))
    yield aten.matmul.default, (_floats(draw(st.sampled_from([1, b])), 1, m, k), _floats(b, k, n))


def _views(draw: Draw) -> Calls:
    shape = _shape(draw)
    x, dim = _floats(*shape), _dim(draw, len(shape))
    size = shape[dim]
    start, end, step = (draw(st.integers(low, size)) for low in (-size, 0, 1))
    yield aten.view.default, (x, draw(st.sampled_from([[-1], [*shape, 1], [1, shape[0], -1]])))
    yield aten.permute.default, (x, draw(st.permutations(range(len(shape)))))
    yield aten.slice.Tensor, (x, dim, start, end, step)
    yield aten.split.Tensor, (x, draw(_SIZES), dim)
    yield aten.cat.default, ([x, _floats(*shape), torch.zeros(0)][: draw(st.integers(1, 3))], dim)
    yield aten.repeat.default, (x, [draw(st.integers(1, 3)) for _ in shape])
    yield aten.constant_pad_nd.default, (x, [draw(st.integers(0, 2)), 1], draw(st.sampled_from([0.0, 1.0, 3.0])))
    yield aten.triu.default, (_floats(*shape, 5), draw(st.integers(-6, 6)))


def _reductions(draw: Draw) -> Calls:
    shape, keepdim = _shape(draw), draw(_YES_OR_NO)
    x, dims, dim = _floats(*shape), _some_dims(draw, len(shape)), _dim(draw, len(shape))
    for op in (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.logsumexp.default):
        yield op, (x, dims, keepdim)
    yield aten.linalg_vector_norm.default, (x, draw(st.sampled_from([2, 1, 0.5, float("inf")])), dims, keepdim)
    yield draw(st.sampled_from([aten.max.dim, aten.argmin.default, aten.prod.dim_int])), (x, dim, keepdim)
    yield draw(st.sampled_from([aten.cumsum.default, aten.cumprod.default, aten.sort.default])), (x, dim)
    yield aten._softmax.default, (x, dim, False)


def _indexing(draw: Draw) -> Calls:
    shape, count = _shape(draw, 2, 3), draw(_SIZES)
    x, dim = _floats(*shape), draw(st.integers(0, len(shape) - 1))
    moved = [*shape[:dim], count, *shape[dim + 1 :]]
    index, places = _indices(shape[dim], count), _indices(shape[dim], *moved)
    yield aten.embedding.default, (_floats(*shape[:2]), _indices(shape[0], count, 2))
    yield (
        aten.embedding_dense_backward.default,
        (_floats(count, shape[1]), _indices(shape[0], count), shape[0], 0, False),
    )
    yield aten.index_select.default, (x, dim, index)
    yield aten.index_add.default, (x, dim, index, _floats(*moved))
    yield aten.gather.default, (x, dim, places)
    yield aten.scatter_add.default, (x, dim, places, _floats(*moved))
    yield aten.index_put.default, (x, [None] * dim + [index - shape[dim] // 2], torch.tensor(2.0), True)


def _normalisation(draw: Draw) -> Calls:
    rows, group, groups, space = _shape(draw, 1, 2), draw(_SIZES), draw(st.integers(1, 4)), _shape(draw, 0, 2)
    width, channels = _shape(draw, 1, 2), groups * group
    weight, bias = (_maybe(draw, _floats(*width)) for _ in range(2))
    yield aten.native_layer_norm.default, (_floats(*rows, *width), width, weight, bias, 1e-5)
    yield aten._fused_rms_norm.default, (_floats(*rows, *width), width, weight, 1e-5)
    x = _floats(rows[0], channels, *space)
    area = x[0, 0].numel()
    weight, bias = (_maybe(draw, _floats(channels)) for _ in range(2))
    yield aten.native_group_norm.default, (x, weight, bias, rows[0], channels, area, groups, 1e-3)
    if rows[0] * area > 1:
        yield aten._native_batch_norm_legit.no_stats, (x, weight, bias, True, 0.1, 1e-3)


def _convolution(draw: Draw) -> Calls:
    groups, inner, outer, kernel = (draw(st.integers(1, high)) for high in (2, 3, 3, 3))
    stride, padding, dilation = (draw(st.integers(low, 2)) for low in (1, 0, 1))
    transposed, size = draw(_YES_OR_NO), dilation * (kernel - 1) + 4 * draw(st.integers(1, 2)) * stride
    weight = _floats(*((groups * inner, outer) if transposed else (groups * outer, inner)), kernel)
    x, bias = _floats(draw(_SIZES), groups * inner, size), _maybe(draw, _floats(groups * outer))
    options = ([stride], [min(padding, kernel // 2)], [dilation], transposed, [0], groups)
    yield aten.convolution.default, (x, weight, bias, *options)
    grad = torch.randn_like(aten.convolution(x, weight, bias, *options))
    yield aten.convolution_backward.default, (grad, x, weight, [groups * outer], *options, [True] * 3)
    plane, pool = _floats(2, 3, 4, 4 * stride), ([1, kernel], [1, stride], [0, kernel // 2])
    yield aten.max_pool2d_with_indices.default, (plane, *pool, 1, draw(_YES_OR_NO))
    yield aten.avg_pool2d.default, (plane, *pool, draw(_YES_OR_NO), draw(_YES_OR_NO))


def _images(draw: Draw) -> Calls:
    batch, channels, height, width = (draw(_SIZES) for _ in range(4))
    x, grid = _floats(batch, channels, height, width), _floats(batch, draw(_SIZES), 2, 2)
    yield aten.upsample_bilinear2d.default, (x, [draw(_SIZES), 2 * width], draw(_YES_OR_NO))
    yield aten.upsample_nearest2d.default, (x, [2 * height, draw(_SIZES)])
    yield aten.grid_sampler_2d.default, (x, grid, draw(st.integers(0, 2)), draw(st.integers(0, 2)), draw(_YES_OR_NO))
    yield aten.pixel_shuffle.default, (_floats(batch, 4 * channels, height, width), 2)
    yield aten.im2col.default, (x, [1, 1], [1, 1], [0, 0], [draw(st.integers(1, 2)), 1])


def _attention(draw: Draw) -> Calls:
    batch, heads, shared, queries, keys = (draw(st.integers(1, high)) for high in (4, 4, 2, 6, 6))
    q, out = (_floats(batch, heads * shared, queries, 4) for _ in range(2))
    k, v = (_floats(batch, heads, keys, 4) for _ in range(2))
    mask = _maybe(draw, _floats(draw(st.sampled_from([1, batch])), 1, queries, keys))
    rest = (0.0, draw(_YES_OR_NO), 0.5, 0, [0, 0, 0, 0], [batch, heads * shared, queries, keys])
    yield ours.attention.default, (q, k, v, mask, None, *rest)
    out, lse = ours.attention(q, k, v, mask, None, *rest)
    yield ours.attention_backward.default, (torch.randn_like(out), q, k, v, mask, out, lse, None, *rest)


def _losses(draw: Draw) -> Calls:
    rows, classes, reduction = draw(_SIZES), draw(st.integers(2, 8)), draw(st.integers(0, 2))
    x, target, smoothing = _floats(rows, classes), _indices(classes, rows), draw(st.sampled_from([0.0, 0.1]))
    y = _floats(draw(st.sampled_from([1, rows])), classes)
    yield ours.cross_entropy.default, (x, target, draw(st.sampled_from([-100, 0])), smoothing)
    yield aten.nll_loss_forward.default, (x, target, _maybe(draw, torch.rand(classes) + 0.1), reduction, -100)
    yield draw(st.sampled_from([aten.mse_loss.default, aten.huber_loss.default])), (x, y, reduction)
    yield aten.binary_cross_entropy_with_logits.default, (x, torch.rand(rows, classes), None, None, reduction)


def _linear_algebra(draw: Draw) -> Calls:
    batch, size, columns = _shape(draw, 0, 2), draw(st.integers(2, 4)), draw(_SIZES)
    x = _floats(*batch, size, size)
    matrix = x @ x.mT + size * torch.eye(size)
    yield aten.linalg_cholesky_ex.default, (matrix,)
    yield aten._linalg_solve_ex.default, (matrix, _floats(*batch, size, columns))
    yield aten._cdist_forward.default, (_floats(*batch, columns, 3), _floats(*batch, size, 3), 2.0, None)
    yield aten._euclidean_dist.default, (_floats(*batch, columns, 3), _floats(*batch, size, 3))


def _creation(draw: Draw) -> Calls:
    shape, value = _shape(draw), draw(st.sampled_from([0, 1.5, -0.0]))
    start, count, step = (draw(st.integers(low, 9)) for low in (-9, 1, 1))
    yield aten.full.default, (shape, value)
    yield aten.new_full.default, (_floats(*shape), draw(st.sampled_from([shape, [4, *shape]])), value)
    yield draw(st.sampled_from([aten.zeros_like.default, aten.ones_like.default])), (_floats(*shape),)
    yield aten.arange.start_step, (start, start + count * step, step)


_FAMILIES = [
    _pointwise, _matmul, _views, _reductions, _indexing, _normalisation, _convolution, _images, _attention, _losses,
    _linear_algebra, _creation,
]  # fmt: skip


@pytest.mark.sample(6)
@pytest.mark.parametrize("family", _FAMILIES, ids=lambda family: family.__name__.strip("_"))
@given(data=st.data(), ranks=st.sampled_from([2, 4]))
def test_every_strategy_on_drawn_shapes(family: Callable[[Draw], Calls], data: st.DataObject, ranks: int) -> None:
    """Every strategy of a drawn call of each family has one device's results."""
    torch.manual_seed(data.draw(st.integers(0, 99)))
    for op, args in family(data.draw):
        assert check_call(op, *args, meshes=[Mesh({"a": ranks})]) >= 1
