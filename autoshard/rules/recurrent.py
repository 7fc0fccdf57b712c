"""Rules of recurrent layers. Only the batch, the factor `b`, may be split.

Each time step multiplies the whole hidden state by a matrix, so a split of features would need a collective at every
step. The product of the input with its weights is an `aten.mm` outside the operator (`autoshard.kernels.recurrent`).
Gradients of weights are sums over `b`. All gradients are linear in the incoming gradients together.
"""

from __future__ import annotations

from typing import Any

import torch

import autoshard.kernels  # noqa: F401  (defines the operators)
from autoshard.rules.notation import Rule
from autoshard.rules.registry import sharding_rule

autoshard_ops = torch.ops.autoshard

_Tensor = torch.Tensor
_STEPS, _STATE, _MATRIX = "b _ _", "b _", "_ _"
"""Notation of values for each row and time step, of values for each row, and of weight matrices."""


def _rule(operands: list[str], results: list[str], **options: Any) -> Rule:
    return Rule(f"{', '.join(operands)} -> {', '.join(results)}", **options)


def _optional(operand: _Tensor | None, dims: str) -> list[str]:
    return [] if operand is None else [dims]


@sharding_rule(autoshard_ops.lstm.default)
def lstm(
    inputs: _Tensor, h0: _Tensor, c0: _Tensor, w_hh: _Tensor, w_hr: _Tensor | None, lengths: _Tensor | None, *_: Any
) -> Rule:
    weights = [_MATRIX, *_optional(w_hr, _MATRIX), *_optional(lengths, "b")]
    return _rule([_STEPS, _STATE, _STATE, *weights], [_STEPS, _STATE, _STATE, _STEPS, _STEPS])


@sharding_rule(autoshard_ops.gru.default)
def gru(inputs: _Tensor, h0: _Tensor, w_hh: _Tensor, b_hh: _Tensor | None, lengths: _Tensor | None, *_: Any) -> Rule:
    weights = [_MATRIX, *_optional(b_hh, "_"), *_optional(lengths, "b")]
    return _rule([_STEPS, _STATE, *weights], [_STEPS, _STATE, _STEPS])


@sharding_rule(autoshard_ops.rnn.default)
def rnn(inputs: _Tensor, h0: _Tensor, w_hh: _Tensor, lengths: _Tensor | None, *_: Any) -> Rule:
    return _rule([_STEPS, _STATE, _MATRIX, *_optional(lengths, "b")], [_STEPS, _STATE])


@sharding_rule(autoshard_ops.lstm_backward.default)
def lstm_backward(
    grad_y: _Tensor | None, grad_h: _Tensor | None, grad_c: _Tensor | None, h0: _Tensor, c0: _Tensor, w_hh: _Tensor,
    w_hr: _Tensor | None, lengths: _Tensor | None, *_: Any,
) -> Rule:  # fmt: skip
    grads = [*_optional(grad_y, _STEPS), *_optional(grad_h, _STATE), *_optional(grad_c, _STATE)]
    weights = [_MATRIX, *_optional(w_hr, _MATRIX)]
    saved = [*_optional(lengths, "b"), *[_STEPS] * 3]
    return _backward(grads, [_STATE, _STATE, *weights, *saved], [_STEPS, _STATE, _STATE, *weights])


@sharding_rule(autoshard_ops.gru_backward.default)
def gru_backward(
    grad_y: _Tensor | None, grad_h: _Tensor | None, h0: _Tensor, w_hh: _Tensor, lengths: _Tensor | None, *_: Any
) -> Rule:
    grads = [*_optional(grad_y, _STEPS), *_optional(grad_h, _STATE)]
    saved = [*_optional(lengths, "b"), _STEPS, _STEPS]
    return _backward(grads, [_STATE, _MATRIX, *saved], [_STEPS, _STATE, _MATRIX, "_"])


@sharding_rule(autoshard_ops.rnn_backward.default)
def rnn_backward(
    grad_y: _Tensor | None, grad_h: _Tensor | None, h0: _Tensor, w_hh: _Tensor, lengths: _Tensor | None, *_: Any
) -> Rule:
    grads = [*_optional(grad_y, _STEPS), *_optional(grad_h, _STATE)]
    return _backward(grads, [_STATE, _MATRIX, *_optional(lengths, "b"), _STEPS], [_STEPS, _STATE, _MATRIX])


def _backward(grads: list[str], operands: list[str], results: list[str]) -> Rule:
    """Return the rule of the backward of a recurrent layer from the notation of gradients, operands and results.

    The backward is linear in the incoming gradients `grads` together.
    """
    return _rule([*grads, *operands], results, reduce={"b": "sum"}, linear=[range(len(grads))])
