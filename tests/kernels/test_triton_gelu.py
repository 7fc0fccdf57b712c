"""The kernel of gelu with bias equals its forms in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoshard.errors import KernelError
from autoshard.kernels.triton_gelu import FUSED, bias_gelu, bias_gelu_backward
from tests.kernels.fused import assert_results, draw, dtypes, expected_of

pytestmark = pytest.mark.usefixtures("_poisoned_outputs")
BACKWARD, FORWARD = FUSED


@given(st.integers(1, 5), st.integers(1, 7), st.integers(1, 41), dtypes, st.integers(0, len(FORWARD.forms) - 1))
def test_bias_gelu(batch: int, rows: int, columns: int, dtype: torch.dtype, index: int) -> None:
    """Output and gradient equal every form's: exact, tanh, and tanh written out, with rows reshaped after the bias or
    not."""
    form = FORWARD.forms[index]
    grad_out, bias = draw(batch, rows, columns, dtype=dtype), draw(columns, dtype=dtype)
    is_reshaped = index >= len(FORWARD.forms) // 2
    x = draw(*((batch * rows, columns) if is_reshaped else (batch, rows, columns)), dtype=dtype)
    out = bias_gelu(x, bias, **form.constants(grad_out))
    assert_results(out, expected_of(form, grad_out, x=x, bias=bias), dtype)
    form = BACKWARD.forms[index]
    grad = bias_gelu_backward(grad_out, x, bias, **form.constants(grad_out))
    assert_results(grad, expected_of(form, grad_out, grad_out=grad_out, x=x, bias=bias), dtype, scale=2.0)


def test_strided_rows_in_several_blocks() -> None:
    """Rows with gaps between them that are longer than a block have the forms' results."""
    x, bias = draw(3, 2000)[:, 100:1700], draw(1600)
    out = bias_gelu(x, bias, [3, 1600], "gelu")
    assert_results(out, expected_of(FORWARD.forms[0], x, x=x, bias=bias), x.dtype)
    grad = bias_gelu_backward(x, x, bias, "gelu")
    assert_results(grad, expected_of(BACKWARD.forms[0], x, grad_out=x, x=x, bias=bias), x.dtype)


def test_what_does_not_fit_is_refused() -> None:
    """A bias of other columns, and a shape with other rows, are refused with the reason."""
    x = draw(4, 3)
    with pytest.raises(KernelError, match="a bias of x's last dim"):
        bias_gelu(x, draw(2), [4, 3], "gelu")
    with pytest.raises(KernelError, match="does not have the rows of x"):
        bias_gelu(x, draw(3), [3, 4], "gelu")
