"""Cases of `tests.benchmarks.gpu_kernels`: every kernel on the sizes of Llama 3 8B, and of Mixtral 8x7B for experts.

There are 8,192 tokens in bfloat16. A case makes its inputs on the default device when called; on the meta device the
case is a dry run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autoshard.kernels.dequantize import GROUP, SCALE_VALUES, dequantize_nf4_reference
from autoshard.kernels.split_cross_entropy import (
    split_cross_entropy_backward_reference,
    split_cross_entropy_reference,
)
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
from cost_models.work import MatmulShape
from tests.benchmarks.gpu_attention_cases import attention
from tests.benchmarks.gpu_case import CLASSES, HEADS, HIDDEN, INNER, SIZE, TOKENS, Case, bytes_of, draw, form
from tests.benchmarks.gpu_liger import Liger

_aten = torch.ops.aten
_EPS, _IGNORED = 1e-5, -100
_BF16, _F32 = torch.bfloat16, torch.float32


def _pointwise() -> Iterator[Case]:
    grad, gate, up = (draw(TOKENS, INNER) for _ in range(3))
    bias, plain, slope = draw(INNER), form(gated_backward), form(bias_gelu_backward)
    yield Case(
        "gated",
        lambda: gated(gate, up, "silu"),
        lambda: F.silu(gate) * up,
        3 * bytes_of(up),
        liger=Liger("LigerSiLUMulFunction", (gate, up)),
    )
    yield Case(
        "gated backward",
        lambda: gated_backward(grad, gate, up, "silu"),
        lambda: plain(gate, grad, gate, up),
        5 * bytes_of(up),
        liger=Liger("LigerSiLUMulFunction", (gate, up), (grad,)),
    )
    yield Case(
        "gated, gelu",
        lambda: gated(gate, up, "gelu_tanh"),
        lambda: F.gelu(gate, approximate="tanh") * up,
        3 * bytes_of(up),
        liger=Liger("LigerGELUMulFunction", (gate, up)),
    )
    yield Case(
        "bias gelu", lambda: bias_gelu(up, bias, list(up.shape), "gelu"), lambda: F.gelu(up + bias), 2 * bytes_of(up)
    )
    yield Case(
        "bias gelu backward",
        lambda: bias_gelu_backward(grad, up, bias, "gelu"),
        lambda: slope(up, grad, up, bias),
        3 * bytes_of(up),
    )
    seed = torch.zeros((), dtype=torch.int64)
    yield Case(
        "dropout",
        lambda: triton_dropout(up, seed, 0.1, 0, [0, 0], list(up.shape)),
        lambda: F.dropout(up, 0.1),
        2 * bytes_of(up),
    )


def _norms() -> Iterator[Case]:
    x, grad, weight, bias = draw(TOKENS, HIDDEN), draw(TOKENS, HIDDEN), draw(HIDDEN), draw(HIDDEN)
    shape, once = [HIDDEN], bytes_of(x)
    _, rstd = rms_norm(x, shape, weight, _EPS)
    yield Case(
        "RMS norm",
        lambda: rms_norm(x, shape, weight, _EPS),
        lambda: F.rms_norm(x, shape, weight, _EPS),
        2 * once,
        liger=Liger("LigerRMSNormFunction", (x, weight, _EPS)),
    )
    yield Case(
        "RMS norm backward",
        lambda: rms_norm_backward(grad, x, shape, rstd, weight, [True, True]),
        lambda: _aten._fused_rms_norm_backward(grad, x, shape, rstd, weight, [True, True]),
        3 * once,
        liger=Liger("LigerRMSNormFunction", (x, weight, _EPS), (grad,)),
    )
    _, mean, spread = layer_norm(x, shape, weight, bias, _EPS)
    yield Case(
        "layer norm",
        lambda: layer_norm(x, shape, weight, bias, _EPS),
        lambda: F.layer_norm(x, shape, weight, bias, _EPS),
        2 * once,
        liger=Liger("LigerLayerNormFunction", (x, weight, bias, _EPS)),
    )
    operands = (x, shape, mean, spread, weight, bias, [True, True, True])
    yield Case(
        "layer norm backward",
        lambda: layer_norm_backward(grad, *operands),
        lambda: _aten.native_layer_norm_backward(grad, *operands),
        3 * once,
        liger=Liger("LigerLayerNormFunction", (x, weight, bias, _EPS), (grad,)),
    )


def _added_norms() -> Iterator[Case]:
    x, residual, grad = (draw(TOKENS, HIDDEN) for _ in range(3))
    weight, bias, x_bias = (draw(HIDDEN) for _ in range(3))
    rms, layer, backward = form(add_rms_norm), form(add_layer_norm), form(add_rms_norm_backward)
    layer_backward = form(add_layer_norm_backward)
    out, rstd, total = add_rms_norm(x, residual, weight, _EPS)
    _, mean, spread, _ = add_layer_norm(x, residual, weight, bias, _EPS)
    once = bytes_of(x)
    added = "LigerFusedAddRMSNormFunction"
    yield Case(
        "add, RMS norm",
        lambda: add_rms_norm(x, residual, weight, _EPS),
        lambda: rms(x, x, residual, weight, _EPS),
        4 * once,
        liger=Liger(added, (x, residual, weight, _EPS)),
    )
    yield Case(
        "add, RMS norm backward",
        lambda: add_rms_norm_backward(out, residual, total, rstd, weight, [1, HIDDEN]),
        lambda: backward(x, out, residual, total, rstd, weight),
        4 * once,
        liger=Liger(added, (x, residual, weight, _EPS), (out, residual)),
    )
    yield Case(
        "add, layer norm",
        lambda: add_layer_norm(x, residual, weight, bias, _EPS),
        lambda: layer(x, x, residual, weight, bias, _EPS),
        4 * once,
    )
    yield Case(
        "add, layer norm backward",
        lambda: add_layer_norm_backward(grad, residual, total, mean, spread, weight, bias),
        lambda: layer_backward(x, grad, residual, total, mean, spread, weight, bias),
        4 * once,
    )
    with_bias, layer_with_bias = form(bias_add_rms_norm), form(bias_add_layer_norm)
    yield Case(
        "bias, add, RMS norm",
        lambda: bias_add_rms_norm(x, x_bias, residual, weight, _EPS),
        lambda: with_bias(x, x, x_bias, residual, weight, _EPS),
        4 * once,
    )
    yield Case(
        "bias, add, layer norm",
        lambda: bias_add_layer_norm(x, x_bias, residual, weight, bias, _EPS),
        lambda: layer_with_bias(x, x, x_bias, residual, weight, bias, _EPS),
        4 * once,
    )


def _rotary() -> Iterator[Case]:
    q, k = draw(1, TOKENS, HEADS, SIZE).transpose(1, 2), draw(1, TOKENS, HEADS // 4, SIZE).transpose(1, 2)
    cos, sin, plain = draw(1, 1, TOKENS, SIZE), draw(1, 1, TOKENS, SIZE), form(rotary, 1)
    yield Case(
        "rotary",
        lambda: rotary(q, k, cos, sin, False, False),
        lambda: plain(q, q, k, cos, sin),
        2 * bytes_of(q, k),
        liger=Liger("LigerRopeFunction", (q, k, cos[0], sin[0])),
    )


def _cross_entropy() -> Iterator[Case]:
    logits, target, ones = draw(TOKENS, CLASSES).requires_grad_(), _targets(), torch.ones(TOKENS)
    name = "LigerCrossEntropyFunction"
    yield Case(
        "cross-entropy",
        lambda: triton_cross_entropy(logits.detach(), target, _IGNORED, 0.0),
        lambda: F.cross_entropy(logits.detach(), target, reduction="none"),
        bytes_of(logits),
    )

    def both() -> Any:
        with torch.no_grad():
            _, lse = triton_cross_entropy(logits, target, _IGNORED, 0.0)
            return (triton_cross_entropy_backward(ones, logits, target, lse, _IGNORED, 0.0),)

    yield Case(
        "cross-entropy, forward and backward",
        both,
        lambda: F.cross_entropy(logits, target, reduction="sum"),
        3 * bytes_of(logits),
        leaves=(logits,),
        grad=torch.ones((), dtype=_BF16),
        liger=Liger(name, (logits.detach(), target, None, _IGNORED, 0.0, 0.0, "sum"), (torch.ones(()),), True),
    )


def _targets() -> Tensor:
    return torch.randint(0, CLASSES, (TOKENS,))


def _linear_cross_entropy() -> Iterator[Case]:
    hidden, weight, target = draw(TOKENS, HIDDEN).requires_grad_(), draw(CLASSES, HIDDEN).requires_grad_(), _targets()
    ones = torch.ones(TOKENS)

    def both() -> Any:
        with torch.no_grad():
            operands = (hidden, weight, target)
            _, lse = linear_cross_entropy(*operands, _IGNORED, 0.0)
            return linear_cross_entropy_backward(ones, *operands, lse, _IGNORED, 0.0)

    arguments = (hidden.detach(), weight.detach(), target, None, None, _IGNORED, 0.0, 0.0, "sum")
    yield Case(
        "linear cross-entropy, forward and backward",
        both,
        lambda: F.cross_entropy(hidden @ weight.t(), target, reduction="sum"),
        products=(MatmulShape(TOKENS, CLASSES, HIDDEN), MatmulShape(TOKENS, CLASSES, HIDDEN),
                  MatmulShape(TOKENS, HIDDEN, CLASSES), MatmulShape(CLASSES, HIDDEN, TOKENS)),
        leaves=(hidden, weight),
        grad=torch.ones((), dtype=_BF16),
        liger=Liger("LigerFusedLinearCrossEntropyFunction", arguments, (torch.ones(()),), True),
    )  # fmt: skip


def _split_cross_entropy(ranks: int = 8) -> Iterator[Case]:
    """Return cases of one of eight ranks with a split vocabulary."""
    columns = CLASSES // ranks
    logits, indices = draw(TOKENS, columns), torch.randint(0, columns, (TOKENS,))
    elsewhere, ignored = torch.zeros(TOKENS, dtype=torch.bool), torch.zeros(TOKENS, dtype=torch.bool)
    top, scale = draw(TOKENS, dtype=_F32), draw(TOKENS, dtype=_F32)
    backward = (logits, top, scale, indices, elsewhere, ignored, -1.0, 0.0)
    yield Case(
        f"cross-entropy, vocabulary split {ranks} ways, local part",
        lambda: triton_split_cross_entropy(logits, top, indices, elsewhere, 1.0),
        lambda: split_cross_entropy_reference(logits, top, indices, elsewhere, 1.0),
        bytes_of(logits),
    )
    yield Case(
        f"cross-entropy, vocabulary split {ranks} ways, backward",
        lambda: triton_split_cross_entropy_backward(*backward),
        lambda: split_cross_entropy_backward_reference(*backward),
        2 * bytes_of(logits),
    )


def _dequantize() -> Iterator[Case]:
    """A case of one layer's NF4 weights with bytes as scales, compared with the reference."""
    weights = HIDDEN * INNER
    packed, absmax = (torch.randint(0, 256, (count,), dtype=torch.uint8) for count in (weights // 2, weights // 64))
    scales = draw(SCALE_VALUES + 1 + absmax.numel() // GROUP, dtype=_F32).view(torch.uint8)
    arguments = (packed, absmax, scales, [INNER, HIDDEN], 64, 0, _BF16)
    yield Case(
        "NF4 to bfloat16",
        lambda: triton_dequantize_nf4(*arguments),
        lambda: dequantize_nf4_reference(*arguments),
        bytes_of(packed, absmax) + 2 * weights,
    )


def cases() -> Iterator[Case]:
    """Return all comparisons of handwritten kernels; each makes its inputs when called."""
    for group in (_pointwise, _norms, _added_norms, _rotary, _cross_entropy, _linear_cross_entropy,
                  _split_cross_entropy, _dequantize):  # fmt: skip
        yield from group()
    for size in (64, 128):
        for length in (2048, 8192, 32768):
            yield from attention(size, length)
