"""The kernels of gated units equal their forms in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoshard.errors import KernelError
from autoshard.kernels.triton_activations import ACTIVATIONS
from autoshard.kernels.triton_gated import FUSED, gated, gated_backward
from tests.kernels.fused import assert_results, draw, dtypes, expected_of

pytestmark = pytest.mark.usefixtures("_poisoned_outputs")
BACKWARD, FORWARD = FUSED


@given(st.integers(1, 19), st.integers(1, 41), dtypes, st.sampled_from(ACTIVATIONS))
def test_gated(rows: int, columns: int, dtype: torch.dtype, activation: str) -> None:
    """The output and the gradients of gate and up equal the forms' at odd sizes, for every activation."""
    grad_out, gate, up = (draw(rows, columns, dtype=dtype) for _ in range(3))
    form = FORWARD.forms[ACTIVATIONS.index(activation)]
    assert_results(gated(gate, up, **form.constants(gate)), expected_of(form, gate, gate=gate, up=up), dtype)
    form = BACKWARD.forms[ACTIVATIONS.index(activation)]
    grads = gated_backward(grad_out, gate, up, **form.constants(gate))
    assert_results(grads, expected_of(form, gate, grad_out=grad_out, gate=gate, up=up), dtype)


def test_halves_of_one_tensor_and_many_blocks() -> None:
    """Gate and up that are the halves of long rows, with several dims before, have the forms' results."""
    both = draw(2, 3, 2 * 1500)
    gate, up = both.chunk(2, dim=-1)
    assert not gate.is_contiguous()
    assert_results(gated(gate, up, "silu"), expected_of(FORWARD.forms[0], gate, gate=gate, up=up), gate.dtype)
    grads = gated_backward(gate, gate, up, "silu")
    expected = expected_of(BACKWARD.forms[0], gate, grad_out=gate, gate=gate, up=up)
    assert_results(grads, expected, gate.dtype)


def test_what_does_not_fit_is_refused() -> None:
    """Operands of other shapes or dtypes, and an unknown activation, are refused with the reason."""
    x = draw(2, 3)
    with pytest.raises(KernelError, match="tensors of one shape"):
        gated(x, x[:1], "silu")
    with pytest.raises(KernelError, match="tensors of one dtype"):
        gated(x, x.half(), "silu")
    with pytest.raises(KernelError, match="activation='relu' is not one of"):
        gated(x, x, "relu")
