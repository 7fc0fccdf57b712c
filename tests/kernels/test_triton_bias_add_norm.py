"""Norms with a bias and a residual against their forms in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoshard.errors import KernelError
from autoshard.kernels.triton_bias_add_norm import FUSED, bias_add_layer_norm, bias_add_rms_norm
from tests.kernels.fused import assert_results, draw, dtypes, expected_of, wide

pytestmark = pytest.mark.usefixtures("_poisoned_outputs")
LAYER, RMS = FUSED
# Large, so that rows of two nearly equal elements are well conditioned.
EPS = 0.1


@given(st.integers(1, 17), st.integers(1, 41), dtypes, st.booleans())
def test_sum_norm_and_statistics(rows: int, columns: int, dtype: torch.dtype, is_centred: bool) -> None:
    """x has the rows of a product, the residual has the model's shape; each form uses the stored sum."""
    x, residual = draw(2 * rows, columns, dtype=dtype), draw(2, rows, columns, dtype=dtype)
    x_bias, weight, bias = (draw(columns, dtype=dtype) for _ in range(3))
    affine = {"weight": weight, "eps": EPS} | ({"bias": bias} if is_centred else {})
    kernel, operator = (LAYER, bias_add_layer_norm) if is_centred else (RMS, bias_add_rms_norm)
    *normed, total = operator(x, x_bias, residual, **affine)
    assert_results(total, (wide(x).view(2, rows, columns) + wide(x_bias) + wide(residual),), dtype)
    nothing = {"x_bias": torch.zeros_like(x_bias), "residual": torch.zeros_like(residual)}
    for form in kernel.forms:
        expected = expected_of(form, total, x=total, **nothing, **affine)
        assert_results(tuple(normed), expected[:-1], dtype)


def test_strided_rows() -> None:
    """Rows of x and of the residual may have gaps between them."""
    x, residual = draw(6, 10)[:, :5], draw(2, 3, 10)[..., 5:]
    x_bias, weight = draw(5), draw(5)
    out, rstd, total = bias_add_rms_norm(x, x_bias, residual, weight, EPS)
    dense = bias_add_rms_norm(x.contiguous(), x_bias, residual.contiguous(), weight, EPS)
    for actual, expected in zip((out, rstd, total), dense, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        (((6, 4), (4,), (2, 2, 4)), "have different rows"),
        (((4, 4), (1,), (2, 2, 4)), "x_bias .1,. is not a row of x"),
        (((4, 4), (4,), (2, 4, 2)), "have different rows"),
    ],
)
def test_what_is_refused(shapes: tuple[tuple[int, ...], ...], reason: str) -> None:
    """Shapes that the kernel does not add up, by name."""
    x, x_bias, residual = (draw(*shape) for shape in shapes)
    with pytest.raises(KernelError, match=reason):
        bias_add_rms_norm(x, x_bias, residual, draw(4), EPS)


def test_mixed_dtypes_are_refused() -> None:
    """A sum of two types is rounded elsewhere."""
    with pytest.raises(KernelError, match="different dtypes"):
        bias_add_layer_norm(draw(4, 4), draw(4, dtype=torch.bfloat16), draw(2, 2, 4), draw(4), draw(4), EPS)
