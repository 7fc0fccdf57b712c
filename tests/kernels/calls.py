"""A small call of every hand-written kernel, for tests of properties that all kernels share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from autoshard.kernels.triton_adam import adam_updates_
from autoshard.kernels.triton_cross_entropy import triton_cross_entropy, triton_cross_entropy_backward
from autoshard.kernels.triton_dequantize import triton_dequantize_nf4
from autoshard.kernels.triton_dropout import triton_dropout
from autoshard.kernels.triton_gated import gated, gated_backward
from autoshard.kernels.triton_gelu import bias_gelu, bias_gelu_backward
from autoshard.kernels.triton_layer_norm import layer_norm, layer_norm_backward
from autoshard.kernels.triton_linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_backward
from autoshard.kernels.triton_rotary import rotary
from autoshard.kernels.triton_softmax import softmax, softmax_backward
from autoshard.kernels.triton_split_cross_entropy import (
    triton_split_cross_entropy,
    triton_split_cross_entropy_backward,
)
from tests.kernels.fused import DEVICE, draw

_IGNORED = -100


def _indices(count: int, below: int) -> Tensor:
    return torch.randint(0, below, (count,), device=DEVICE)


def _norm(rows: int, columns: int) -> Any:
    x, weight, bias = draw(rows, columns), draw(columns), draw(columns)
    out, mean, rstd = layer_norm(x, [columns], weight, bias, 1e-5)
    return out, *layer_norm_backward(out, x, [columns], mean, rstd, weight, bias, [True, True, True])


def _gated(rows: int, columns: int) -> Any:
    gate, up = draw(rows, columns), draw(rows, columns)
    return gated(gate, up, "silu"), *gated_backward(up, gate, up, "silu")


def _gelu(rows: int, columns: int) -> Any:
    x, bias = draw(rows, columns), draw(columns)
    return bias_gelu(x, bias, [rows, columns], "gelu"), bias_gelu_backward(x, x, bias, "gelu")


def _softmax(rows: int, columns: int) -> Any:
    out = softmax(draw(rows, columns), -1, False)
    return out, softmax_backward(draw(rows, columns), out, -1, torch.float32)


def _cross_entropy(rows: int, columns: int) -> Any:
    logits, target = draw(rows, columns), _indices(rows, columns)
    loss, lse = triton_cross_entropy(logits, target, _IGNORED, 0.1)
    return loss, lse, triton_cross_entropy_backward(loss, logits, target, lse, _IGNORED, 0.1)


def _linear_cross_entropy(rows: int, columns: int) -> Any:
    """Use three chunks of classes: their kernels carry sums from chunk to chunk and write over the logits."""
    hidden, weight, target = draw(rows, 8), draw(8200, 8), _indices(rows, 8200)
    loss, lse = linear_cross_entropy(hidden, weight, target, _IGNORED, 0.1)
    return loss, lse, *linear_cross_entropy_backward(loss, hidden, weight, target, lse, _IGNORED, 0.1)


def _split_cross_entropy(rows: int, columns: int) -> Any:
    logits, indices, elsewhere = draw(rows, columns), _indices(rows, columns), _indices(rows, 2).bool()
    top = logits.amax(1)
    total, expected = triton_split_cross_entropy(logits, top, indices, elsewhere, 0.9)
    rest = (total, top, indices, elsewhere, ~elsewhere, -0.9, 1e-3)
    return total, expected, triton_split_cross_entropy_backward(logits, *rest)


def _rotary(rows: int, columns: int) -> Any:
    q, k, cos, sin = draw(1, 3, rows, 12), draw(1, 1, rows, 12), draw(1, 1, rows, 12), draw(1, 1, rows, 12)
    return rotary(q, k, cos, sin, False, False)


def _dropout(rows: int, columns: int) -> Any:
    seed = torch.tensor(7, device=DEVICE)
    return triton_dropout(draw(rows, columns), seed, 0.3, 1, [0, 0], [rows, columns])


def _dequantize(rows: int, columns: int) -> Any:
    packed, absmax = _indices(rows * columns, 256).byte(), _indices(rows * columns, 256).byte()
    scales = draw(257 + rows * columns // 256 + 1).view(torch.uint8)
    return triton_dequantize_nf4(packed, absmax, scales, [rows, 2 * columns], 2, 0, torch.float32)


def _adam(rows: int, columns: int) -> Any:
    """In place."""
    params, grads, first, second = ([draw(rows, columns), draw(columns)] for _ in range(4))
    second = [x.abs() for x in second]
    hyper = torch.tensor([1e-2, 0.9, 0.99, 1e-8, 0.1, 3.0], dtype=torch.float64)
    adam_updates_(params, grads, first, second, None, hyper, True, False)
    return *params, *first, *second


# A name, and a function of the numbers of rows and of columns that gives tensors.
CALLS: Mapping[str, Callable[[int, int], Any]] = {
    call.__name__.strip("_"): call
    for call in (
        *(_norm, _gated, _gelu, _softmax, _cross_entropy, _linear_cross_entropy, _split_cross_entropy),
        *(_rotary, _dropout, _dequantize, _adam),
    )
}


def run(name: str, rows: int, columns: int) -> tuple[Tensor, ...]:
    """Return the results of a call, the same each time."""
    torch.manual_seed(0)
    found = CALLS[name](rows, columns)
    return found if isinstance(found, tuple) else (found,)
