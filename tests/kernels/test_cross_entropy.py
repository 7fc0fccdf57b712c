"""`autoshard::cross_entropy` against torch.nn.functional.cross_entropy."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from autoshard.kernels import cross_entropy

IGNORE = -100


def _case(rows: int, classes: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits that require grad, and targets, some of them ignored."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(rows, classes, generator=generator, dtype=torch.float64)
    target = torch.randint(0, classes, (rows,), generator=generator)
    target[torch.rand(rows, generator=generator) < 0.25] = IGNORE
    return logits.to(dtype).requires_grad_(), target


@given(st.integers(1, 6), st.integers(1, 9), st.sampled_from([0.0, 0.1, 1.0]), st.integers(0, 99))
def test_equals_torch_in_float64(rows: int, classes: int, smoothing: float, seed: int) -> None:
    """Loss and gradient equal torch's to float64 rounding, and ignored rows have a zero gradient."""
    logits, target = _case(rows, classes, torch.float64, seed)
    weight = torch.randn(rows, dtype=torch.float64)
    loss, lse = cross_entropy(logits, target, IGNORE, smoothing)
    expected = F.cross_entropy(logits, target, reduction="none", ignore_index=IGNORE, label_smoothing=smoothing)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(lse, logits.logsumexp(1))
    (grad,) = torch.autograd.grad(loss, logits, weight)
    (expected_grad,) = torch.autograd.grad(expected, logits, weight)
    torch.testing.assert_close(grad, expected_grad)
    assert bool((grad[target == IGNORE] == 0).all())


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_equals_torch_in_float32(smoothing: float) -> None:
    """In float32 loss and gradient agree with torch within 1e-6 relative."""
    logits, target = _case(33, 57, torch.float32)
    loss, _ = cross_entropy(logits, target, IGNORE, smoothing)
    expected = F.cross_entropy(logits, target, reduction="none", ignore_index=IGNORE, label_smoothing=smoothing)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    grads = [torch.autograd.grad(value.sum(), logits)[0] for value in (loss, expected)]
    torch.testing.assert_close(*grads, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_logits_have_a_float32_loss(dtype: torch.dtype) -> None:
    """The loss of 16-bit logits is float32 and equals float64's, and the gradient has the logits' dtype."""
    logits, target = _case(9, 21, dtype)
    loss, lse = cross_entropy(logits, target, IGNORE, 0.1)
    assert loss.dtype == lse.dtype == torch.float32
    expected = F.cross_entropy(logits.double(), target, reduction="none", label_smoothing=0.1)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    assert grad.dtype == dtype


def test_infinite_ignored_row_gives_no_nan() -> None:
    """An ignored row that contains an infinity has zero loss and a zero gradient, and all gradients are finite."""
    logits = torch.tensor([[float("inf"), 1.0], [2.0, 3.0]], requires_grad=True)
    loss, _ = cross_entropy(logits, torch.tensor([IGNORE, 1]), IGNORE, 0.1)
    loss.sum().backward()
    assert logits.grad is not None
    assert loss.tolist()[0] == 0.0
    assert logits.grad[0].tolist() == [0.0, 0.0]
    assert bool(logits.grad.isfinite().all())


def test_opcheck() -> None:
    """Torch's checks of a custom operator pass for transposed logits, and the gradient is contiguous as in the fake
    run."""
    logits = torch.randn(5, 4).t().requires_grad_()
    target = torch.tensor([0, 1, IGNORE, 4])
    torch.library.opcheck(cross_entropy, (logits, target, IGNORE, 0.1))
    (grad,) = torch.autograd.grad(cross_entropy(logits, target, IGNORE, 0.1)[0].sum(), logits)
    assert grad.is_contiguous()
