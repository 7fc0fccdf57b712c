"""RMS norm has the backward on CPUs that torch lacks there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import autoshard.kernels  # noqa: F401  (registers the backward)


@pytest.mark.parametrize("has_weight", [False, True])
@pytest.mark.parametrize("normalized_shape", [[5], [3, 5]])
def test_backward_equals_torchs_composition(normalized_shape: list[int], has_weight: bool) -> None:
    """The fused operator's output and gradients equal those of the formula in float64."""
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(normalized_shape, dtype=torch.float64, requires_grad=True) if has_weight else None
    inputs: tuple[Tensor, ...] = (x,) if weight is None else (x, weight)
    out = torch.ops.aten._fused_rms_norm.default(x, normalized_shape, weight, 1e-3)[0]
    dims = tuple(range(-len(normalized_shape), 0))
    expected = x * torch.rsqrt(x.square().mean(dims, keepdim=True) + 1e-3)
    if weight is not None:
        expected = expected * weight
    torch.testing.assert_close(out, expected)
    grad = torch.randn_like(out)
    actual = torch.autograd.grad(out, inputs, grad)
    wanted = torch.autograd.grad(expected, inputs, grad)
    for mine, theirs in zip(actual, wanted, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_half_gradients_keep_their_dtype() -> None:
    """Gradients of bfloat16 inputs are bfloat16, and equal float64's within 2%."""
    x = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(8, dtype=torch.bfloat16, requires_grad=True)
    out = torch.ops.aten._fused_rms_norm.default(x, [8], weight, 1e-5)[0]
    grads = torch.autograd.grad(out.sum(), (x, weight))
    assert [grad.dtype for grad in grads] == [torch.bfloat16, torch.bfloat16]
    wide = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    expected = torch.autograd.grad(F.rms_norm(wide[0], [8], wide[1], 1e-5).sum(), wide)
    for mine, theirs in zip(grads, expected, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=2e-2, atol=2e-2)
