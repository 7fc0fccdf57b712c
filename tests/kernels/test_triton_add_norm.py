"""Norms with residuals against their forms in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from autoshard.errors import KernelError
from autoshard.kernels import triton_norm
from autoshard.kernels.triton_add_norm import (
    FUSED,
    add_layer_norm,
    add_layer_norm_backward,
    add_rms_norm,
    add_rms_norm_backward,
)
from autoshard.kernels.triton_rms_norm import rms_norm
from tests.kernels.fused import assert_results, draw, dtypes, expected_of, wide

pytestmark = pytest.mark.usefixtures("_poisoned_outputs")
RMS_BACKWARD, LAYER_BACKWARD, ADD_RMS, ADD_LAYER, RMS = FUSED
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
    """Sum, norm, statistics and all gradients, for the form of small operators, and for the norm alone."""
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
    """Sum, norm and statistics, and all gradients."""
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
    """The fused operator, forward and backward, equals the small operators."""
    inputs = _inputs(3, 5, torch.float32)
    out, rstd, total = add_rms_norm(**inputs, eps=EPS)
    assert_results((out, rstd, total), expected_of(ADD_RMS.forms[1], out, **inputs, eps=EPS), torch.float32)
    arguments = {"grad_out": out, "residual_grad": total, "input": total, "rstd": rstd, "weight": inputs["weight"]}
    actual = add_rms_norm_backward(**arguments, weight_shape=[5])
    assert_results(actual, expected_of(RMS_BACKWARD.forms[2], out, **arguments), torch.float32)


def test_strided_inputs_and_many_rows_per_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs with gaps between rows; weight gradients are whole when programs walk several blocks."""
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
