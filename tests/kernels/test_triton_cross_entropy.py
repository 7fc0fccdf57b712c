"""The cross-entropy kernels equal torch in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from autoshard.kernels import triton_cross_entropy
from autoshard.kernels.triton_cross_entropy import Chunk, cross_entropy_backward_into

pytestmark = pytest.mark.usefixtures("_poisoned_outputs")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IGNORE = -100
forward = triton_cross_entropy.triton_cross_entropy
backward = triton_cross_entropy.triton_cross_entropy_backward


def _case(rows: int, classes: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and targets, some of them ignored."""
    logits = (3 * torch.randn(rows, classes, device=DEVICE)).to(dtype)
    target = torch.randint(0, classes, (rows,), device=DEVICE)
    target[::5] = IGNORE
    return logits, target


def _check(logits: torch.Tensor, target: torch.Tensor, smoothing: float) -> None:
    """Loss, log-sum-exp and gradient equal torch's in float64."""
    loss, lse = forward(logits, target, IGNORE, smoothing)
    wide = logits.double().requires_grad_()
    expected = F.cross_entropy(wide, target, reduction="none", label_smoothing=smoothing)
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(lse.double(), logits.double().logsumexp(1), rtol=2e-6, atol=2e-6)
    grad_loss = torch.randn(loss.shape, device=DEVICE)
    grad = backward(grad_loss, logits, target, lse, IGNORE, smoothing)
    (wanted,) = torch.autograd.grad(expected, wide, grad_loss.double())
    eps = torch.finfo(logits.dtype).eps
    torch.testing.assert_close(grad.double(), wanted, rtol=max(eps, 1e-5), atol=max(eps / 8, 1e-6))


@given(
    st.integers(1, 37),
    st.integers(1, 43),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from([0.0, 0.1]),
)
def test_equals_torch(rows: int, classes: int, dtype: torch.dtype, smoothing: float) -> None:
    """Loss and gradient equal torch's float64 results at odd sizes."""
    logits, target = _case(rows, classes, dtype)
    _check(logits, target, smoothing)


def test_walks_long_rows_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row longer than a block has the right loss and gradient, also when whole blocks are -inf."""
    monkeypatch.setattr(triton_cross_entropy, "_MAX_BLOCK", 8)
    logits, target = _case(21, 29, torch.float32)
    _check(logits, target, 0.1)
    logits[:, :9] = -float("inf")
    target[target < 9] = 20
    _check(logits, target, 0.0)


def test_strided_logits() -> None:
    """Logits with gaps between rows, and transposed logits, give torch's results."""
    logits, target = _case(11, 19, torch.float32)
    _check(logits[:, 2:17], target.clamp(max=14), 0.1)
    _check(logits.t().contiguous().t(), target, 0.1)


def test_backward_may_overwrite_the_logits() -> None:
    """The gradient may be written over a strided view of logits, and the elements around the view keep their values."""
    whole = torch.randn(7, 13, device=DEVICE)
    before = whole.clone()
    logits = whole[1:6, 2:11]
    target = torch.tensor([0, 8, IGNORE, 3, 4], device=DEVICE)
    _, lse = forward(logits, target, IGNORE, 0.0)
    grad_loss = torch.randn(5, device=DEVICE)
    expected = backward(grad_loss, logits, target, lse, IGNORE, 0.0)
    cross_entropy_backward_into(logits, grad_loss, logits, target, lse, IGNORE, 0.0, Chunk(0, 9))
    assert torch.equal(logits, expected)
    before[1:6, 2:11] = expected
    assert torch.equal(whole, before)


def test_a_target_that_is_no_class_gives_nan() -> None:
    """A target that is no class has the loss NaN and the gradient NaN."""
    logits = torch.randn(3, 5, device=DEVICE)
    target = torch.tensor([1, 5, -1], device=DEVICE)
    loss, lse = forward(logits, target, IGNORE, 0.0)
    assert loss.isnan().tolist() == [False, True, True]
    grad = backward(torch.ones_like(loss), logits, target, lse, IGNORE, 0.0)
    assert grad.isnan().all(1).tolist() == [False, True, True]
