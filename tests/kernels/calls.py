"""A small call of every hand-written kernel, for tests of properties that all kernels share.

Calls run the operators' implementations. So they launch kernels on any device, even on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from autoshard.kernels.library import implementation_of
from autoshard.kernels.triton_cross_entropy import triton_cross_entropy, triton_cross_entropy_backward
from autoshard.kernels.triton_dequantize import triton_dequantize_nf4
from autoshard.kernels.triton_dropout import triton_dropout
from autoshard.kernels.triton_gated import gated, gated_backward
from autoshard.kernels.triton_gelu import bias_gelu, bias_gelu_backward
from autoshard.kernels.triton_linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_backward
from autoshard.kernels.triton_norms import (
    add_layer_norm,
    add_layer_norm_backward,
    add_rms_norm,
    add_rms_norm_backward,
    bias_add_layer_norm,
    bias_add_rms_norm,
    layer_norm,
    layer_norm_backward,
    rms_norm,
    rms_norm_backward,
)
from autoshard.kernels.triton_rotary import rotary
from autoshard.kernels.triton_split_cross_entropy import (
    triton_split_cross_entropy,
    triton_split_cross_entropy_backward,
)
from tests.kernels.fused import DEVICE

_IGNORED, _EPS = -100, 1e-5


def _run(operator: OpOverload, *operands: Any) -> Any:
    return implementation_of(operator)(*operands)


def _draw(*shape: int) -> Tensor:
    return torch.randn(shape)


def _indices(count: int, below: int) -> Tensor:
    return torch.randint(0, below, (count,))


def _layer_norm(rows: int, columns: int) -> Any:
    x, weight, bias = _draw(rows, columns), _draw(columns), _draw(columns)
    out, mean, rstd = _run(layer_norm, x, [columns], weight, bias, _EPS)
    return out, *_run(layer_norm_backward, out, x, [columns], mean, rstd, weight, bias, [True, True, True])


def _rms_norm(rows: int, columns: int) -> Any:
    x, weight = _draw(rows, columns), _draw(columns)
    out, rstd = _run(rms_norm, x, [columns], weight, _EPS)
    return out, *_run(rms_norm_backward, out, x, [columns], rstd, weight, [True, True])


def _added_layer_norm(rows: int, columns: int) -> Any:
    x, residual, weight, bias = _draw(rows, columns), _draw(rows, columns), _draw(columns), _draw(columns)
    out, mean, rstd, total = _run(add_layer_norm, x, residual, weight, bias, _EPS)
    biased = _run(bias_add_layer_norm, x, bias, residual, weight, bias, _EPS)
    return out, *biased, *_run(add_layer_norm_backward, out, residual, total, mean, rstd, weight, bias)


def _added_rms_norm(rows: int, columns: int) -> Any:
    x, residual, weight, bias = _draw(rows, columns), _draw(rows, columns), _draw(columns), _draw(columns)
    out, rstd, total = _run(add_rms_norm, x, residual, weight, _EPS)
    biased = _run(bias_add_rms_norm, x, bias, residual, weight, _EPS)
    return out, *biased, *_run(add_rms_norm_backward, out, residual, total, rstd, weight, [columns])


def _gated(rows: int, columns: int) -> Any:
    gate, up = _draw(rows, columns), _draw(rows, columns)
    return _run(gated, gate, up, "silu"), *_run(gated_backward, up, gate, up, "silu")


def _gelu(rows: int, columns: int) -> Any:
    x, bias = _draw(rows, columns), _draw(columns)
    return _run(bias_gelu, x, bias, [rows, columns], "gelu"), _run(bias_gelu_backward, x, x, bias, "gelu")


def _cross_entropy(rows: int, columns: int) -> Any:
    logits, target = _draw(rows, columns), _indices(rows, columns)
    loss, lse = _run(triton_cross_entropy, logits, target, _IGNORED, 0.1)
    return loss, lse, _run(triton_cross_entropy_backward, loss, logits, target, lse, _IGNORED, 0.1)


def _linear_cross_entropy(rows: int, columns: int) -> Any:
    """The hidden size is 8. The 8200 classes make three chunks, whose kernels carry sums from chunk to chunk and write
    over the logits."""
    hidden, weight, target = _draw(rows, 8), _draw(8200, 8), _indices(rows, 8200)
    loss, lse = _run(linear_cross_entropy, hidden, weight, target, _IGNORED, 0.1)
    return loss, lse, *_run(linear_cross_entropy_backward, loss, hidden, weight, target, lse, _IGNORED, 0.1)


def _split_cross_entropy(rows: int, columns: int) -> Any:
    logits, indices, elsewhere = _draw(rows, columns), _indices(rows, columns), _indices(rows, 2).bool()
    top = logits.amax(1).float()
    total, expected = _run(triton_split_cross_entropy, logits, top, indices, elsewhere, 0.9)
    rest = (total, top, indices, elsewhere, ~elsewhere, -0.9, 1e-3)
    return total, expected, _run(triton_split_cross_entropy_backward, logits, *rest)


def _rotary(rows: int, columns: int) -> Any:
    size = 2 * max(1, min(columns, 128) // 2)
    q, k, cos, sin = _draw(1, 3, rows, size), *(_draw(1, 1, rows, size) for _ in range(3))
    return _run(rotary, q, k, cos, sin, False, False)


def _dropout(rows: int, columns: int) -> Any:
    return _run(triton_dropout, _draw(rows, columns), torch.tensor(7), 0.3, 1, [0, 0], [rows, columns])


def _dequantize(rows: int, columns: int) -> Any:
    packed, absmax = _indices(rows * columns, 256).byte(), _indices(rows * columns, 256).byte()
    scales = torch.randn(257 + rows * columns // 256 + 1, dtype=torch.float32).view(torch.uint8)
    rest = ([rows, 2 * columns], 2, 0, torch.get_default_dtype())
    plain = torch.randn(rows * columns, dtype=torch.float32).view(torch.uint8)
    nested = _run(triton_dequantize_nf4, packed, absmax, scales, *rest)
    return nested, _run(triton_dequantize_nf4, packed, plain, None, *rest)


# A name, and a function of the numbers of rows and of columns that gives tensors.
CALLS: Mapping[str, Callable[[int, int], Any]] = {
    call.__name__.strip("_"): call
    for call in (
        *(_layer_norm, _rms_norm, _added_layer_norm, _added_rms_norm, _gated, _gelu, _cross_entropy),
        *(_linear_cross_entropy, _split_cross_entropy, _rotary, _dropout, _dequantize),
    )
}


def run(name: str, rows: int, columns: int, device: torch.device = DEVICE) -> tuple[Tensor, ...]:
    """The results of a call. They are the same each time."""
    torch.manual_seed(0)
    with device:
        found = CALLS[name](rows, columns)
    return found if isinstance(found, tuple) else (found,)
