"""Reductions have one device's results under every strategy, with results pending, or reduced inside the call."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoshard.rules import strategies
from autoshard.testing.strategies import meshes
from tests.rules.recording import check_call, check_database, check_splits, tensor

aten = torch.ops.aten
_REDUCERS = [aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.logsumexp.default]


@given(st.data())
def test_reductions(data: st.DataObject) -> None:
    """Under every strategy, reductions over drawn dims, with `keepdim` or without, equal one device's."""
    shape = data.draw(st.lists(st.sampled_from([1, 2, 4, 6]), min_size=1, max_size=3))
    dims = data.draw(st.lists(st.sampled_from(range(-len(shape), len(shape))), unique_by=lambda d: d % len(shape)))
    if not dims:
        dims = [0]
    op = data.draw(st.sampled_from(_REDUCERS))
    check_call(op, tensor(*shape), dims, data.draw(st.booleans()))


@pytest.mark.parametrize("order", [2, 1, 0, 3, math.inf, -math.inf])
def test_vector_norm(order: float) -> None:
    """Under every strategy, norms equal one device's. A norm of a split tensor is whole, not pending."""
    check_splits(aten.linalg_vector_norm.default, tensor(4, 8), order)
    check_splits(aten.linalg_vector_norm.default, tensor(4, 8), order, [1], True)
    found = strategies(aten.linalg_vector_norm.default, (tensor(4, 8),), {}, 2)
    assert any(inputs[0].is_shard(0) and outputs[0].is_replicate() for inputs, outputs in found)


@pytest.mark.parametrize("order", [1, 3, 2, None, math.inf])
def test_norms_of_any_order_are_theirs(order: float | None) -> None:
    """`aten.norm` equals `torch.linalg.vector_norm` on one device, and has the same result under every strategy."""
    x = tensor(4, 8)
    expected = torch.linalg.vector_norm(x, 2 if order is None else order, dim=1)
    torch.testing.assert_close(aten.norm.ScalarOpt_dim(x, order, [1]), expected)
    check_splits(aten.norm.ScalarOpt_dim, x, order, [1])
    check_splits(aten.norm.ScalarOpt_dim, x, order, [0], True)
    if order is not None:
        check_splits(aten.norm.Scalar, x, order)


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.any.dim, (tensor(4, 8) > 3, 1)),
        (aten.all.dim, (tensor(4, 8) > -4, 0, True)),
        (aten.any.default, (tensor(4, 8) > 3,)),
        (aten.prod.dim_int, (tensor(4, 2), 0)),
        (aten.max.dim, (tensor(4, 8), 1)),
        (aten.argmax.default, (tensor(4, 8), 0)),
        (aten.var.correction, (tensor(4, 8), [1])),
        (aten.var_mean.correction, (tensor(4, 8), [0])),
        (aten._softmax.default, (tensor(4, 8), -1, False)),
        (aten._log_softmax_backward_data.default, (tensor(4, 8), tensor(4, 8), 1, torch.float64)),
        (aten.cumsum.default, (tensor(4, 8), 1)),
        (aten.sort.default, (tensor(4, 8), 1)),
        (aten.sort.stable, (tensor(4, 8),)),
        (aten.topk.default, (tensor(4, 8), 2, 0)),
        (aten.histc.default, (tensor(4, 8), 4, -2, 2)),
        (aten.glu.default, (tensor(4, 8), 1)),
    ],
    ids=str,
)
def test_forms(op: torch._ops.OpOverload, args: tuple[object, ...]) -> None:
    """Under every strategy, each reduction, scan or sort has one device's results."""
    check_splits(op, *args, **({"stable": True} if op is aten.sort.stable else {}))


@given(st.data())
def test_statistics_over_split_dims(data: st.DataObject) -> None:
    """Under every strategy on a drawn mesh, variances, log-sum-exps and extremes with indices equal one device's."""
    shape = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    mesh = data.draw(meshes(max_axes=2, max_ranks=6))
    dims = data.draw(st.lists(st.sampled_from(range(len(shape))), min_size=1, unique=True))
    keepdim = data.draw(st.booleans())
    x = tensor(*shape)
    check_call(aten.logsumexp.default, x, dims, keepdim, meshes=[mesh])
    options = {"correction": data.draw(st.sampled_from([0, 0.5])), "keepdim": keepdim}
    for op in (aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction):
        check_call(op, x + 0.1, dims, meshes=[mesh], **options)
    for op in (aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default):
        check_call(op, x, dims[0], keepdim, meshes=[mesh])
    check_call(aten.aminmax.default, x, dim=dims[0], keepdim=keepdim, meshes=[mesh])


@given(st.data())
def test_scans_along_split_dims(data: st.DataObject) -> None:
    """Under every strategy on a drawn mesh, cumulative sums and products equal one device's, in each dtype."""
    shape = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    mesh, dim = data.draw(meshes(max_axes=2, max_ranks=6)), data.draw(st.integers(-len(shape), len(shape) - 1))
    dtype = data.draw(st.sampled_from([torch.float64, torch.int32, torch.bool]))
    for op in (aten.cumsum.default, aten.cumprod.default):
        check_call(op, tensor(*shape).to(dtype), dim, meshes=[mesh])
    check_call(aten.cumsum.default, tensor(*shape), dim, dtype=torch.float32, meshes=[mesh])


def test_the_first_of_equal_extremes_is_found() -> None:
    """Under every strategy, the index of equal extremes or of NaN is that of one device."""
    ties, x = torch.ones(3, 7), tensor(3, 7)
    x[1, 5], x[2, 1], x[2, 6] = math.nan, math.nan, math.nan
    for values in (ties, x, -ties * math.inf, ties.long()):
        for op in (aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default):
            check_splits(op, values, 1)


def test_offsets_far_from_zero() -> None:
    """Under every strategy, variances and log-sum-exps of numbers far from zero equal one device's."""
    check_splits(aten.var.correction, torch.randn(4, 7) + 1e4, [1])
    check_splits(aten.var_mean.correction, (torch.randn(4, 8) + 4).bfloat16(), [1])
    check_splits(aten.logsumexp.default, tensor(4, 7) * 1e3, [1])
    check_splits(aten.logsumexp.default, tensor(4, 7) - math.inf, [1])


def test_what_is_reduced_inside_arrives_whole() -> None:
    """Variances, log-sum-exps and argmax over a split dim are whole; argmax over all dims is not split."""
    x = tensor(4, 8)
    for op, args in (
        (aten.var.correction, (x, [1])),
        (aten.argmax.default, (x, 1)),
        (aten.logsumexp.default, (x, [1])),
    ):
        found = strategies(op, args, {}, 2)
        assert any(inputs[0].is_shard(1) and outputs[0].is_replicate() for inputs, outputs in found)
    assert not any(inputs[0].is_shard() for inputs, _ in strategies(aten.argmax.default, (x,), {}, 2))


def test_the_range_of_a_histogram_must_be_given() -> None:
    """A histogram without a given range is not split, because its bins depend on the data of all ranks."""
    assert len(strategies(aten.histc.default, (tensor(4, 8), 4), {}, 2)) == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.int32, torch.uint8, torch.bool], ids=str)
def test_results_of_another_type(dtype: torch.dtype) -> None:
    """Under every strategy, reductions to another dtype equal one device's, although conversions round or wrap."""
    x, result = (20 * tensor(5, 7)).abs().to(dtype), {torch.float64: torch.int64}.get(dtype, torch.float32)
    for given_type in (None, result):
        check_splits(aten.sum.dim_IntList, x * 0.75 if x.is_floating_point() else x, [0], dtype=given_type)
        check_splits(aten.cumsum.default, x, 0, dtype=given_type)
        check_splits(aten.cumsum.default, x[:1], 0, dtype=given_type)
    check_splits(aten.prod.dim_int, x[:1] + 0.5, 0, dtype=torch.int64)
    check_splits(aten.nansum.default, x[:1] + 0.5, [0], dtype=torch.int64)


def test_norms_in_half_precision() -> None:
    """Under every strategy, float16 norms equal one device's, although squares of the elements overflow."""
    for order in (2, 3, 0.5):
        check_splits(aten.linalg_vector_norm.default, 100 * (tensor(5, 7).half() + 5), order, [0])


def test_truths_over_no_dims() -> None:
    """With an empty list of dims, `any` and `all` reduce no dim, and equal one device's under every strategy."""
    for x in (tensor(4, 6), tensor(4, 6) > 0):
        for op in (aten.any.dims, aten.all.dims):
            check_splits(op, x, [])


def test_means_of_nothing() -> None:
    """The mean of an empty tensor is NaN, also under every strategy that splits the tensor."""
    check_splits(aten.mean.dim, torch.zeros(4, 0), [1])


# fmt: off
_SAMPLED = [
    "all", "amax", "any", "argmax", "aminmax", "count_nonzero", "cumprod", "cumsum", "kthvalue", "linalg.vector_norm",
    "log_softmax", "logsumexp", "max", "mean", "median", "min", "mode", "nansum", "nn.functional.glu", "prod", "renorm",
    "softmax", "sort", "std", "sum", "topk", "var", "var_mean",
]
# fmt: on


def test_on_the_samples_of_pytorch() -> None:
    """On PyTorch's samples of reductions, every strategy has one device's results, forward and backward."""
    tally = check_database(_SAMPLED)
    assert not tally.failures, "\n".join(tally.failures)
    assert tally.strategies > 300
