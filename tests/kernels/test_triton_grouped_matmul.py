"""The grouped products against products of each group in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autoshard.errors import KernelError
from autoshard.kernels.triton_grouped_matmul import grouped_matmul
from tests.kernels.fused import DEVICE, assert_results, draw, dtypes, wide

pytestmark = pytest.mark.usefixtures("_poisoned_outputs")


def _ends(sizes: list[int]) -> Tensor:
    return torch.tensor(sizes, device=DEVICE).cumsum(0).to(torch.int32)


def _check_rows(x: Tensor, weight: Tensor, sizes: list[int]) -> None:
    pieces = zip(wide(x).split(sizes), wide(weight), strict=True)
    expected = torch.cat([piece @ matrix for piece, matrix in pieces])
    assert_results(grouped_matmul(x, weight, _ends(sizes)), (expected,), x.dtype, scale=x.shape[1] ** 0.5)


def _check_depth(x: Tensor, y: Tensor, sizes: list[int]) -> None:
    pieces = zip(wide(x).split(sizes, dim=1), wide(y).split(sizes), strict=True)
    expected = torch.stack([left @ right for left, right in pieces])
    assert_results(grouped_matmul(x, y, _ends(sizes)), (expected,), x.dtype, scale=x.shape[1] ** 0.5)


@settings(max_examples=8)
@given(st.lists(st.integers(0, 70), min_size=1, max_size=3).filter(any), st.integers(1, 40), st.integers(1, 9), dtypes)
def test_groups_of_rows_and_of_depth(sizes: list[int], depth: int, columns: int, dtype: torch.dtype) -> None:
    """Groups of any size, empty ones too: the product of tokens and experts, and that of the experts' gradient."""
    columns *= 8
    x = draw(sum(sizes), depth, dtype=dtype)
    _check_rows(x, draw(len(sizes), depth, columns, dtype=dtype), sizes)
    _check_depth(x.t(), draw(sum(sizes), columns, dtype=dtype), sizes)


def test_strided_operands_in_several_blocks() -> None:
    """Transposed weights, as `nn.Linear` has them, and rows with gaps; more columns and depth than one block."""
    x, weight = draw(90, 200)[:, 20:170], draw(3, 136, 150).transpose(1, 2)
    _check_rows(x, weight, [50, 0, 40])
    _check_depth(x.t(), draw(90, 200)[:, :136], [33, 57, 0])


def test_what_does_not_fit_is_refused() -> None:
    """Batches without offsets, biases, and rows that torch would pad are refused with the reason."""
    x, weight, ends = draw(4, 6), draw(2, 6, 8), _ends([2, 2])
    with pytest.raises(KernelError, match="with offs"):
        grouped_matmul(x, weight)
    with pytest.raises(KernelError, match="has no bias"):
        grouped_matmul(x, weight, ends, draw(2, 8))
    with pytest.raises(KernelError, match="multiple of 16 bytes"):
        grouped_matmul(x, weight[..., :3], ends)
    with pytest.raises(KernelError, match="offs in int32"):
        grouped_matmul(x, weight, ends.long())
