"""Derivatives of the semantic operators of any order equal finite differences, or raise an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import autoshard.kernels as kernels
from autoshard.errors import NotAvailableError
from autoshard.kernels.library import gradients_with_graph
from tests.kernels.experts import Layer

SEED = torch.tensor(3)


def _numbers(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def _cross_entropy(smoothing: float) -> tuple[Any, ...]:
    target = torch.tensor([0, 3, -100, 2])
    return lambda logits: kernels.cross_entropy(logits, target, -100, smoothing)[0], _numbers(4, 5)


def _attention(mask: Tensor | None, p: float, is_causal: bool, groups: int) -> tuple[Any, ...]:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rest = (mask, SEED, p, is_causal, 0.5, 1, [0] * 4, [2, 2, 3, 3])
        return kernels.attention(q, k, v, *rest)[0]

    return call, _numbers(2, 2, 3, 4), _numbers(2, groups, 3, 4) * 1.1, _numbers(2, groups, 3, 4) * 0.9


def _lstm(projected: bool, lengths: Tensor | None, reverse: bool) -> tuple[Any, ...]:
    fed_back = 2 if projected else 3
    weights = (_numbers(12, fed_back), *((_numbers(2, 3),) if projected else ()))

    def call(x: Tensor, h: Tensor, c: Tensor, w_hh: Tensor, w_hr: Tensor | None = None) -> tuple[Tensor, ...]:
        return kernels.lstm(x, h, c, w_hh, w_hr, lengths, reverse)[:3]

    return call, _numbers(2, 4, 12), _numbers(2, fed_back), _numbers(2, 3), *weights


def _gru(lengths: Tensor | None, reverse: bool) -> tuple[Any, ...]:
    def call(x: Tensor, h: Tensor, w_hh: Tensor, b_hh: Tensor) -> tuple[Tensor, ...]:
        return kernels.gru(x, h, w_hh, b_hh, lengths, reverse)[:2]

    return call, _numbers(2, 4, 9), _numbers(2, 3), _numbers(9, 3), _numbers(9)


def _rnn(lengths: Tensor | None) -> tuple[Any, ...]:
    def call(x: Tensor, h: Tensor, w_hh: Tensor) -> tuple[Tensor, ...]:
        return kernels.rnn(x, h, w_hh, lengths, False, False)

    return call, _numbers(2, 4, 3), _numbers(2, 3), _numbers(3, 3)


def _experts(**options: Any) -> tuple[Any, ...]:
    layer = Layer.drawn(torch.Generator().manual_seed(0), tokens=3, hidden=3, inner=2, count=3, **options)
    rest = (layer.count, layer.activation, layer.transposed, layer.interleaved, layer.alpha, layer.limit)
    operands = (layer.x, layer.weights, layer.gate_up, layer.down, *(() if layer.bias is None else (layer.bias,)))

    def call(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, bias: Tensor | None = None) -> Tensor:
        return kernels.experts(x, layer.index, weights, gate_up, bias, down, *rest)

    return call, *(operand.requires_grad_() for operand in operands)


_MASK = torch.tensor([[True, False, True], [False, False, False], [True, True, True]])
LENGTHS = torch.tensor([4, 2])
CASES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "cross-entropy": lambda: _cross_entropy(0.0),
    "smoothed cross-entropy": lambda: _cross_entropy(0.2),
    "attention": lambda: _attention(None, 0.0, False, 2),
    "attention with dropout, causal": lambda: _attention(None, 0.4, True, 2),
    "attention of grouped heads with a mask": lambda: _attention(_MASK, 0.0, False, 1),
    "LSTM": lambda: _lstm(False, None, False),
    "LSTM, projected, packed, reversed": lambda: _lstm(True, LENGTHS, True),
    "GRU": lambda: _gru(None, True),
    "GRU, packed": lambda: _gru(LENGTHS, False),
    "RNN": lambda: _rnn(None),
    "RNN, packed": lambda: _rnn(LENGTHS),
    "experts": _experts,
    "experts, biased, interleaved, clamped": lambda: _experts(bias=True, interleaved=True, activation="clamped_silu"),
    "experts without a gate, transposed": lambda: _experts(transposed=True, halves=1, activation="gelu"),
}


@pytest.mark.sample(7)
@pytest.mark.parametrize("name", CASES)
def test_second_derivative(name: str) -> None:
    """First and second derivatives equal finite differences."""
    call, *operands = CASES[name]()
    operands = [operand.detach().requires_grad_() for operand in operands]
    assert gradcheck(call, operands)
    assert gradgradcheck(call, operands)


def test_third_derivative() -> None:
    """The third derivative of cross-entropy equals finite differences."""
    call, logits = CASES["cross-entropy"]()

    def gradient(logits: Tensor) -> Tensor:
        return torch.autograd.grad(call(logits).square().sum(), logits, create_graph=True)[0]

    assert gradgradcheck(gradient, [logits])


def test_gradients_of_nothing() -> None:
    """A result whose incoming gradient is None gives None as the gradient of every operand."""

    class Context:
        saved_tensors = ()
        needs_input_grad = (True, False)

    assert gradients_with_graph(Context(), lambda x, _: (x,), (_numbers(2), 1.0), (None,)) == (None, None)


@pytest.mark.parametrize("eps", [1e-3, None])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_composite_of_rms_norm(dtype: torch.dtype, eps: float | None) -> None:
    """The composite's results equal those of torch's fused operator."""
    x, weight = (1e-3 * _numbers(3, 2, 4)).to(dtype), _numbers(2, 4).to(dtype)
    expected = torch.ops.aten._fused_rms_norm.default(x, [2, 4], weight, eps)
    torch.testing.assert_close(kernels.rms_norm_composite(x, [2, 4], weight, eps), expected, check_dtype=False)


def test_refused_ctc_loss() -> None:
    """A second derivative of CTC, which torch lacks too, raises when a gradient reaches it, and the first derivative
    does not."""
    scores = _numbers(5, 2, 4)
    lengths = (torch.tensor([5, 5]), torch.tensor([2, 2]))
    loss, _ = kernels.ctc_loss(scores.log_softmax(2), torch.tensor([[1, 2], [3, 1]]), *lengths, 0, False)
    (gradient,) = torch.autograd.grad(loss.sum(), scores, create_graph=True)
    with pytest.raises(NotAvailableError, match=r"CTC loss has no second derivative.*ctc_loss_backward"):
        gradient.square().sum().backward()
