"""The softmax kernels against torch in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoshard.errors import KernelError
from autoshard.kernels.triton_softmax import softmax, softmax_backward, softmax_into

pytestmark = pytest.mark.usefixtures("_poisoned_outputs")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _tolerance(dtype: torch.dtype) -> float:
    """Two roundings to the dtype; some float32 operations."""
    return max(2 * torch.finfo(dtype).eps, 2e-6)


@given(st.integers(1, 40), st.integers(1, 37), st.sampled_from(DTYPES), st.booleans())
def test_equals_torch(rows: int, columns: int, dtype: torch.dtype, is_transposed: bool) -> None:
    """Output and gradient equal torch's float64 results at odd sizes, also for transposed inputs."""
    x = (4 * torch.randn(columns, rows, device=DEVICE)).to(dtype)
    x = x.t() if is_transposed else x.t().contiguous()
    grad_out = torch.randn(rows, columns, device=DEVICE).to(dtype)
    out = softmax(x, -1, False)
    expected = torch.softmax(x.double(), -1)
    tolerance = _tolerance(dtype)
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=1e-7)
    grad = softmax_backward(grad_out, out, 1, dtype)
    wide, wide_grad = out.double(), grad_out.double()
    wanted = wide * (wide_grad - (wide * wide_grad).sum(-1, keepdim=True))
    torch.testing.assert_close(grad.double(), wanted, rtol=tolerance, atol=2e-6)


def test_minus_infinity_and_many_dims() -> None:
    """Masked elements get 0; leading dims are rows; half inputs may give float32."""
    x = torch.randn(2, 3, 5, device=DEVICE).to(torch.bfloat16)
    x[..., 2] = -float("inf")
    out = softmax(x, 2, True)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, torch.softmax(x.float(), -1), rtol=1e-6, atol=1e-7)


def test_stores_nothing_outside_its_rows() -> None:
    """Strided views are read and written in place; memory around them is untouched."""
    whole = torch.randn(7, 11, device=DEVICE)
    out = torch.full((9, 13), float("nan"), device=DEVICE)
    softmax_into(whole[1:6, 2:9], out[2:7, 3:10])
    torch.testing.assert_close(out[2:7, 3:10], torch.softmax(whole[1:6, 2:9], -1))
    assert int(out.isnan().sum()) == 9 * 13 - 5 * 7


def test_another_dim_is_refused() -> None:
    """The kernel covers the last dim and says so."""
    with pytest.raises(KernelError, match="triton_softmax does not apply: dim=0 of 2 is not the last"):
        softmax(torch.zeros(2, 3, device=DEVICE), 0, False)
