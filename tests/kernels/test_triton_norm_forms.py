"""Norms with residuals and biases equal their forms in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from autoshard.errors import KernelError
from autoshard.kernels import triton_norm
from autoshard.kernels.triton_norm_forms import FUSED
from autoshard.kernels.triton_norms import (
    add_layer_norm,
    add_layer_norm_backward,
    add_rms_norm,
    add_rms_norm_backward,
    bias_add_layer_norm,
    bias_add_rms_norm,
    rms_norm,
)
from tests.kernels.fused import assert_results, draw, dtypes, expected_of, wide

pytestmark = pytest.mark.usefixtures("_poisoned_outputs")
BIAS_LAYER, BIAS_RMS, RMS_BACKWARD, LAYER_BACKWARD, ADD_RMS, ADD_LAYER, RMS = FUSED
# Large, so that rows of two nearly equal elements are well conditioned.
EPS = 0.1


def _inputs(rows: int, columns: int, dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        "x": draw(2, rows, columns, dtype=dtype),
        "residual": draw(2, rows, columns, dtype=dtype),
        "weight": draw(columns, dtype=dtype),
    }


@given(st.integers(1, 17), st.integers(1, 41), dtypes)
def test_add_rms_norm(rows: int, columns: int, dtype: torch.dtype) -> None:
    """Sum, norm, statistics and gradients equal the forms', and so does the RMS norm without a residual."""
    inputs = _inputs(rows, columns, dtype)
    out, rstd, total = add_rms_norm(**inputs, eps=EPS)
    # The norm is of the sum as it is stored.
    alone = {"input": total, "weight": inputs["weight"], "eps": EPS}
    assert_results((out, rstd), expected_of(RMS.forms[0], out, **alone), dtype)
    assert_results(total, (wide(inputs["x"]) + wide(inputs["residual"]),), dtype)
    assert_results(rms_norm(**alone, **RMS.forms[0].constants(out)), expected_of(RMS.forms[0], out, **alone), dtype)
    saved = {"input": total, "rstd": rstd, "weight": inputs["weight"]}
    for index, grads in enumerate(({"residual_grad": inputs["x"]}, {})):
        form, arguments = RMS_BACKWARD.forms[index], {"grad_out": inputs["residual"], **saved, **grads}
        actual = add_rms_norm_backward(**arguments, **form.constants(out))
        assert_results(actual, expected_of(form, out, **arguments), dtype, scale=rows)


@given(st.integers(1, 17), st.integers(1, 41), dtypes)
def test_add_layer_norm(rows: int, columns: int, dtype: torch.dtype) -> None:
    """Sum, norm, statistics and all gradients equal the forms'."""
    inputs, bias = _inputs(rows, columns, dtype), draw(columns, dtype=dtype)
    *normed, total = add_layer_norm(**inputs, bias=bias, eps=EPS)
    arguments = {"x": total, "residual": torch.zeros_like(total), "weight": inputs["weight"], "bias": bias, "eps": EPS}
    assert_results(tuple(normed), expected_of(ADD_LAYER.forms[0], total, **arguments)[:3], dtype)
    assert_results(total, (wide(inputs["x"]) + wide(inputs["residual"]),), dtype)
    arguments = {"grad_out": inputs["residual"], "residual_grad": inputs["x"], "input": total, "mean": normed[1]}
    arguments |= {"rstd": normed[2], "weight": inputs["weight"], "bias": bias}
    actual = add_layer_norm_backward(**arguments)
    assert_results(actual, expected_of(LAYER_BACKWARD.forms[0], total, **arguments), dtype, scale=rows)


def test_torchs_own_rms_norm_is_a_form_too() -> None:
    """The kernels equal the forms that contain torch's own RMS norm, forward and backward."""
    inputs = _inputs(3, 5, torch.float32)
    out, rstd, total = add_rms_norm(**inputs, eps=EPS)
    assert_results((out, rstd, total), expected_of(ADD_RMS.forms[1], out, **inputs, eps=EPS), torch.float32)
    arguments = {"grad_out": out, "residual_grad": total, "input": total, "rstd": rstd, "weight": inputs["weight"]}
    actual = add_rms_norm_backward(**arguments, weight_shape=[5])
    assert_results(actual, expected_of(RMS_BACKWARD.forms[2], out, **arguments), torch.float32)


def test_strided_inputs_and_many_rows_per_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are right for inputs with gaps between rows, and when programs go over several blocks of rows."""
    monkeypatch.setattr(triton_norm, "SUMMING_PROGRAMS", 2)
    x, residual, weight = draw(2, 90, 20)[:, 3:, 4:11], draw(2, 7, 87).transpose(1, 2), draw(14)[::2]
    out, rstd, total = add_rms_norm(x, residual, weight, EPS)
    inputs = {"x": x, "residual": residual, "weight": weight}
    assert_results((out, rstd, total), expected_of(ADD_RMS.forms[0], out, **inputs, eps=EPS), torch.float32)
    arguments = {"grad_out": x, "residual_grad": residual, "input": total, "rstd": rstd, "weight": weight}
    actual = add_rms_norm_backward(**arguments, weight_shape=[1, 1, 7])
    assert_results(actual, expected_of(RMS_BACKWARD.forms[0], out, **arguments), torch.float32, scale=20)


def test_what_is_added_must_fit() -> None:
    """A residual of another shape is refused with the reason."""
    x = draw(2, 3)
    with pytest.raises(KernelError, match="the added tensors have shapes"):
        add_rms_norm(x, x[:1], draw(3), EPS)


@given(st.integers(1, 17), st.integers(1, 41), dtypes, st.booleans())
def test_sum_norm_and_statistics(rows: int, columns: int, dtype: torch.dtype, is_centred: bool) -> None:
    """The kernel equals each form when x has the rows of a product and the residual has the model's shape."""
    x, residual = draw(2 * rows, columns, dtype=dtype), draw(2, rows, columns, dtype=dtype)
    x_bias, weight, bias = (draw(columns, dtype=dtype) for _ in range(3))
    affine = {"weight": weight, "eps": EPS} | ({"bias": bias} if is_centred else {})
    kernel, operator = (BIAS_LAYER, bias_add_layer_norm) if is_centred else (BIAS_RMS, bias_add_rms_norm)
    *normed, total = operator(x, x_bias, residual, **affine)
    assert_results(total, (wide(x).view(2, rows, columns) + wide(x_bias) + wide(residual),), dtype)
    nothing = {"x_bias": torch.zeros_like(x_bias), "residual": torch.zeros_like(residual)}
    for form in kernel.forms:
        expected = expected_of(form, total, x=total, **nothing, **affine)
        assert_results(tuple(normed), expected[:-1], dtype)


def test_strided_rows_with_a_bias() -> None:
    """Rows of x and of the residual that have gaps between them give the results of contiguous copies."""
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
def test_rows_and_biases_that_do_not_fit_are_refused(shapes: tuple[tuple[int, ...], ...], reason: str) -> None:
    """Operands with different rows, or a bias of another length, are refused with their shapes."""
    x, x_bias, residual = (draw(*shape) for shape in shapes)
    with pytest.raises(KernelError, match=reason):
        bias_add_rms_norm(x, x_bias, residual, draw(4), EPS)


def test_mixed_dtypes_are_refused() -> None:
    """Addends of different dtypes are refused."""
    with pytest.raises(KernelError, match="different dtypes"):
        bias_add_layer_norm(draw(4, 4), draw(4, dtype=torch.bfloat16), draw(2, 2, 4), draw(4), draw(4), EPS)
