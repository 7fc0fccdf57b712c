"""Matrix products: linear in each operand, contracted factors leave sums pending, addends count once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoshard.rules import strategies
from tests.rules.recording import check_database, check_splits, tensor

aten = torch.ops.aten
_SIZES = st.sampled_from([1, 2, 4, 6])


@given(b=_SIZES, m=_SIZES, k=_SIZES, n=_SIZES)
def test_products(b: int, m: int, k: int, n: int) -> None:
    """All shapes of products, with and without an addend."""
    check_splits(aten.mm.default, tensor(m, k), tensor(k, n))
    check_splits(aten.bmm.default, tensor(b, m, k), tensor(b, k, n))
    check_splits(aten.addmm.default, tensor(n), tensor(m, k), tensor(k, n))
    check_splits(aten.matmul.default, tensor(b, 1, m, k), tensor(2, k, n))


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.mv.default, (tensor(4, 8), tensor(8))),
        (aten.dot.default, (tensor(8), tensor(8))),
        (aten.addmm.default, (tensor(4, 1), tensor(4, 8), tensor(8, 2))),
        (aten.baddbmm.default, (tensor(2, 1, 4), tensor(2, 4, 8), tensor(2, 8, 4))),
        (aten.addmv.default, (tensor(4), tensor(4, 8), tensor(8))),
        (aten.addbmm.default, (tensor(4, 4), tensor(2, 4, 8), tensor(2, 8, 4))),
        (aten.linear.default, (tensor(2, 4, 8), tensor(4, 8), tensor(4))),
        (aten.linear.default, (tensor(2, 4, 8), tensor(4, 8))),
        (aten.matmul.default, (tensor(8), tensor(2, 8, 4))),
        (aten.matmul.default, (tensor(2, 4, 8), tensor(8))),
    ],
    ids=str,
)
def test_forms(op: torch._ops.OpOverload, args: tuple[object, ...]) -> None:
    """Every strategy computes what the call computes."""
    check_splits(op, *args)


def test_a_bias_is_added_once() -> None:
    """Where the contracted factor is split, the bias must be a pending sum."""
    found = strategies(aten.addmm.default, (tensor(4), tensor(2, 8), tensor(8, 4)), {}, 2)
    contracted = [inputs for inputs, _ in found if inputs[1].is_shard(1)]
    assert [str(inputs[0]) for inputs in contracted] == ["P(sum)"]


@pytest.mark.parametrize("rows", [[2, 5, 8], [0, 8, 8], [1, 2, 6]])
def test_grouped_products(rows: list[int]) -> None:
    """Rows keep their experts when they are split, rows beyond the last expert's too."""
    moe = pytest.importorskip("transformers.integrations.moe")
    assert moe is not None
    ops = torch.ops.transformers
    x, weight, offsets, grad = tensor(8, 4), tensor(3, 4, 2), torch.tensor(rows, dtype=torch.int32), tensor(8, 2)
    check_splits(ops.grouped_mm_fallback.default, x, weight, offsets)
    check_splits(ops.grouped_mm_fallback_backward.default, x, weight, offsets, grad)


def test_on_the_samples_of_pytorch() -> None:
    """PyTorch's own samples run under every strategy, forward and backward."""
    names = ["addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "dot", "matmul", "mm", "mv", "nn.functional.linear"]
    tally = check_database([*names, "outer", "linalg.solve_triangular"])
    assert not tally.failures, "\n".join(tally.failures)
