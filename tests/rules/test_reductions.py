"""Reductions: reduced dims leave their reduction pending, dims needed whole are never split."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoshard.rules import strategies
from tests.rules.recording import check_call, check_database, check_splits, tensor

aten = torch.ops.aten
_REDUCERS = [aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.logsumexp.default]


@given(st.data())
def test_reductions(data: st.DataObject) -> None:
    """Any dims, kept or not, of any shape."""
    shape = data.draw(st.lists(st.sampled_from([1, 2, 4, 6]), min_size=1, max_size=3))
    dims = data.draw(st.lists(st.sampled_from(range(-len(shape), len(shape))), unique_by=lambda d: d % len(shape)))
    if not dims:
        dims = [0]
    op = data.draw(st.sampled_from(_REDUCERS))
    check_call(op, tensor(*shape), dims, data.draw(st.booleans()))


@pytest.mark.parametrize("order", [2, 1, 0, 3, math.inf, -math.inf])
def test_vector_norm(order: float) -> None:
    """Powers are summed over ranks inside, so that the norm arrives whole."""
    check_splits(aten.linalg_vector_norm.default, tensor(4, 8), order)
    check_splits(aten.linalg_vector_norm.default, tensor(4, 8), order, [1], True)
    found = strategies(aten.linalg_vector_norm.default, (tensor(4, 8),), {}, 2)
    assert any(inputs[0].is_shard(0) and outputs[0].is_replicate() for inputs, outputs in found)


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
    """Every strategy computes what the call computes."""
    check_splits(op, *args, **({"stable": True} if op is aten.sort.stable else {}))


def test_the_range_of_a_histogram_must_be_given() -> None:
    """Bins that depend on the data of all ranks cannot be counted apart."""
    assert len(strategies(aten.histc.default, (tensor(4, 8), 4), {}, 2)) == 1


# fmt: off
_SAMPLED = [
    "all", "amax", "any", "argmax", "aminmax", "count_nonzero", "cumprod", "cumsum", "kthvalue", "linalg.vector_norm",
    "log_softmax", "logsumexp", "max", "mean", "median", "min", "mode", "nansum", "nn.functional.glu", "prod", "renorm",
    "softmax", "sort", "std", "sum", "topk", "var", "var_mean",
]
# fmt: on


def test_on_the_samples_of_pytorch() -> None:
    """PyTorch's own samples run under every strategy, forward and backward."""
    tally = check_database(_SAMPLED)
    assert not tally.failures, "\n".join(tally.failures)
    assert tally.strategies > 300
