"""Attention for `tests.benchmarks.gpu_kernels`: beside torch's backends, which are chosen where it is timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autoshard.kernels.triton_attention import triton_attention
from autoshard.kernels.triton_attention_backward import triton_attention_backward
from autoshard.kernels.triton_packed_attention import triton_packed_attention, triton_packed_attention_backward
from cost_models.work import AttentionShape
from tests.benchmarks.gpu_case import HEADS, SIZE, TOKENS, Case, draw


def attention(size: int, length: int) -> Iterator[Case]:
    q, k, v, grad = (draw(1, HEADS // 2, length, size).requires_grad_() for _ in range(4))
    constants = (0.0, True, size**-0.5, 0, [0] * 4, list(q.shape))
    with torch.no_grad():
        out, lse = triton_attention(q, k, v, None, None, *constants)

    def forward() -> Any:
        with torch.no_grad():
            return triton_attention(q, k, v, None, None, *constants)

    def plain() -> Any:
        with torch.no_grad():
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def backward() -> Any:
        with torch.no_grad():
            return triton_attention_backward(grad, q, k, v, None, out, lse, None, *constants)

    def plain_backward() -> Callable[[], Any]:
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return lambda: torch.autograd.grad(expected, (q, k, v), grad, retain_graph=True)

    name = f"attention, head {size}, {length}"
    shape = AttentionShape(HEADS // 2, length, length, size, size, causal=True)
    yield Case(name, forward, lambda: plain, attention=shape)
    yield Case(f"{name}, backward", backward, plain_backward, attention=shape._replace(backward=True))


def packed_attention(sequences: int = 4) -> Iterator[Case]:
    """Sequences of one length behind each other, beside a batch of them."""
    q, k, v, grad = (draw(TOKENS, HEADS, SIZE) for _ in range(4))
    starts = torch.arange(sequences + 1, dtype=torch.int32) * (TOKENS // sequences)
    rest = (starts, starts, True, 0, SIZE**-0.5)
    out, lse = triton_packed_attention(q, k, v, *rest)

    def batch(x: Tensor) -> Tensor:
        return x.view(sequences, -1, HEADS, SIZE).transpose(1, 2)

    def packed(x: Tensor) -> Tensor:
        return x.transpose(1, 2).reshape(TOKENS, HEADS, SIZE)

    def plain() -> Callable[[], Any]:
        return lambda: packed(F.scaled_dot_product_attention(batch(q), batch(k), batch(v), is_causal=True))

    def plain_backward() -> Callable[[], Any]:
        leaves = tuple(x.detach().requires_grad_() for x in (q, k, v))
        query, key, value = map(batch, leaves)
        expected = packed(F.scaled_dot_product_attention(query, key, value, is_causal=True))
        return lambda: torch.autograd.grad(expected, leaves, grad, retain_graph=True)

    length = TOKENS // sequences
    shape = AttentionShape(HEADS * sequences, length, length, SIZE, SIZE, causal=True)
    name = f"packed attention, {sequences} sequences of {length}"
    yield Case(name, lambda: triton_packed_attention(q, k, v, *rest), plain, attention=shape)
    yield Case(
        f"{name}, backward",
        lambda: triton_packed_attention_backward(grad, q, k, v, out, lse, *rest),
        plain_backward,
        attention=shape._replace(backward=True),
    )
