"""Matrix products have one device's results under every strategy; split contracted dims leave sums pending."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.ir.mesh import Mesh
from autoshard.rules import strategies
from autoshard.rules.matmul import scaled_mm
from autoshard.rules.registry import bound_rule
from tests.rules.recording import MESH_PAIRS, check_database, check_splits, tensor

aten = torch.ops.aten
_SIZES = st.sampled_from([1, 2, 4, 6])


@settings(max_examples=15)
@given(b=_SIZES, m=_SIZES, k=_SIZES, n=_SIZES, pairs=st.tuples(*[MESH_PAIRS] * 4))
def test_products(b: int, m: int, k: int, n: int, pairs: tuple[Sequence[Mesh], ...]) -> None:
    """Under every strategy, products of drawn sizes, with and without an addend, equal one device's."""
    check_splits(aten.mm.default, tensor(m, k), tensor(k, n), meshes=pairs[0])
    check_splits(aten.bmm.default, tensor(b, m, k), tensor(b, k, n), meshes=pairs[1])
    check_splits(aten.addmm.default, tensor(n), tensor(m, k), tensor(k, n), meshes=pairs[2])
    check_splits(aten.matmul.default, tensor(b, 1, m, k), tensor(2, k, n), meshes=pairs[3])


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
    """Under every strategy, each product operator has one device's result."""
    check_splits(op, *args)


def test_a_bias_is_added_once() -> None:
    """If the contracted dim is split, the bias must be a pending sum, so that it counts once."""
    found = strategies(aten.addmm.default, (tensor(4), tensor(2, 8), tensor(8, 4)), {}, 2)
    contracted = [inputs for inputs, _ in found if inputs[1].is_shard(1)]
    assert [str(inputs[0]) for inputs in contracted] == ["P(sum)"]


@pytest.mark.parametrize("rows", [[2, 5, 8], [0, 8, 8], [1, 2, 6]])
def test_grouped_products(rows: list[int]) -> None:
    """Under every strategy, grouped products equal one device's, also with empty experts and rows behind the last."""
    moe = pytest.importorskip("transformers.integrations.moe")
    assert moe is not None
    ops = torch.ops.transformers
    x, weight, offsets, grad = tensor(8, 4), tensor(3, 4, 2), torch.tensor(rows, dtype=torch.int32), tensor(8, 2)
    check_splits(ops.grouped_mm_fallback.default, x, weight, offsets)
    check_splits(ops.grouped_mm_fallback_backward.default, x, weight, offsets, grad)


def test_rows_of_grouped_products_stay_aligned() -> None:
    """Columns of bfloat16 operands are split in units of eight elements, because the kernel needs 16-byte alignment."""
    x, weight = tensor(16, 48).bfloat16(), tensor(3, 48, 16).bfloat16()
    offsets = torch.tensor([4, 9, 16], dtype=torch.int32)
    result = torch.empty(16, 16, dtype=torch.bfloat16)
    bound = bound_rule(aten._grouped_mm.default, (x, weight, offsets), {}, [result])
    assert bound is not None
    assert {name: size for name, size in bound.sizes.items() if name in bound.splittable} == {"s": 16, "k": 6, "n": 2}
    check_splits(aten._grouped_mm.default, x, weight, offsets)


def test_addends_of_integers() -> None:
    """Under every strategy, integer products with addends equal one device's."""
    a, b = tensor(5, 7).long(), tensor(7, 4).long()
    check_splits(aten.addmm.default, tensor(4).long(), a, b)
    check_splits(aten.addbmm.default, tensor(5, 4).long(), a.expand(3, 5, 7), b.expand(3, 7, 4))
    check_splits(aten.addr.default, tensor(5, 4).long(), tensor(5).long(), tensor(4).long())


def test_on_the_samples_of_pytorch() -> None:
    """On PyTorch's samples of products, every strategy has one device's results, forward and backward."""
    names = ["addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "dot", "matmul", "mm", "mv", "nn.functional.linear"]
    tally = check_database([*names, "outer", "linalg.solve_triangular"])
    assert not tally.failures, "\n".join(tally.failures)


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_scaled_products(by_row: bool, has_bias: bool) -> None:
    """Under every strategy, 8-bit products with scales equal one device's.

    A contracted split needs a float32 result.
    """
    a, b = tensor(48, 32).to(torch.float8_e4m3fn), tensor(16, 32).to(torch.float8_e4m3fn).t()
    scales = (torch.rand(48, 1), torch.rand(1, 16)) if by_row else (torch.tensor(0.5), torch.tensor(3.0))
    bias = tensor(16).float() if has_bias else None
    check_splits(aten._scaled_mm.default, a, b, *scales, bias, out_dtype=torch.float32)
    specs = [str(inputs[:2]) for inputs, _ in _scaled(a, b, scales, torch.float32)]
    narrow = [str(inputs[:2]) for inputs, _ in _scaled(a, b, scales, torch.float8_e4m3fn)]
    assert len(specs) == 4
    assert set(specs) - set(narrow) == {"(Shard(dim=1), Shard(dim=0))"}


def _scaled(a: torch.Tensor, b: torch.Tensor, scales: tuple[torch.Tensor, ...], out_dtype: torch.dtype) -> list:
    return strategies(aten._scaled_mm.default, (a, b, *scales), {"out_dtype": out_dtype}, 2)


def test_blocks_of_scales_are_not_split() -> None:
    """A scaled product with one scale per block of columns has no rule."""
    a, b = torch.zeros(16, 256, dtype=torch.float8_e4m3fn), torch.zeros(256, 16, dtype=torch.float8_e4m3fn)
    scales = (torch.ones(16, 2), torch.ones(2, 16))
    assert scaled_mm(a, b, *scales) is None
