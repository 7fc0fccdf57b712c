"""Attention cases of `tests.benchmarks.gpu_kernels`, compared with the backends of torch, which are selected while
a case is timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional as F

from autoshard.kernels.native_attention import native, native_backward
from cost_models.work import AttentionShape
from tests.benchmarks.gpu_case import HEADS, Case, draw


def attention(size: int, length: int) -> Iterator[Case]:
    q, k, v, grad = (draw(1, HEADS // 2, length, size).requires_grad_() for _ in range(4))
    constants = (0.0, True, size**-0.5, 0, [0] * 4, list(q.shape))
    with torch.no_grad():
        out, lse = native(q, k, v, None, None, *constants)

    def forward() -> Any:
        with torch.no_grad():
            return native(q, k, v, None, None, *constants)

    def plain() -> Any:
        with torch.no_grad():
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def backward() -> Any:
        with torch.no_grad():
            return native_backward(grad, q, k, v, None, out, lse, None, *constants)

    def plain_backward() -> Callable[[], Any]:
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return lambda: torch.autograd.grad(expected, (q, k, v), grad, retain_graph=True)

    name = f"attention, head {size}, {length}"
    shape = AttentionShape(HEADS // 2, length, length, size, size, causal=True)
    yield Case(name, forward, lambda: plain, attention=shape)
    yield Case(f"{name}, backward", backward, plain_backward, attention=shape._replace(backward=True))
