"""One comparison of `tests.benchmarks.gpu_kernels`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from autoshard.kernels.registry import FUSED
from cost_models.compute import matmul_time, memory_time
from cost_models.device import Device
from cost_models.work import AttentionShape, MatmulShape
from tests.benchmarks.attention_times import attention_time
from tests.benchmarks.gpu_liger import Liger

# Of Llama 3 8B.
TOKENS, HIDDEN, INNER, HEADS, SIZE, CLASSES = 8192, 4096, 14336, 32, 128, 128256


class Kind(Enum):
    """The resource that bounds a case, which decides how the case is judged."""

    MEMORY = "memory"
    PRODUCTS = "products"
    ATTENTION = "attention"
    BLOCK = "block"


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison.

    Args:
        name: kernel and shape.
        ours, plain: the kernel, and the same function in ordinary operators, without arguments. For an attention
            `plain`
            makes the timed function under a backend.
        moved_bytes: bytes to read and write.
        products: matrix products that bound the time, if any.
        attention: the shape of an attention.
        leaves, grad: the leaves and the output gradient, if `plain` is differentiated too.
        liger: the same function by Liger-Kernel, if available.
        compiles: whether `torch.compile` is timed; not for a single library call or a function on the host.
    """

    name: str
    ours: Callable[[], Any]
    plain: Callable[[], Any]
    moved_bytes: int = 0
    products: tuple[MatmulShape, ...] = ()
    attention: AttentionShape | None = None
    leaves: tuple[Tensor, ...] = ()
    grad: Tensor | None = None
    liger: Liger | None = None
    compiles: bool = True

    @property
    def kind(self) -> Kind:
        """The kind of resource that bounds this case."""
        if self.attention is not None:
            return Kind.ATTENTION
        return Kind.PRODUCTS if self.products else Kind.MEMORY

    @property
    def flops(self) -> float:
        """FLOPs of the case's products. Attention counts half for a causal mask, and 2.5 times the forward for a
        backward."""
        if self.attention is None:
            return sum(shape.flops for shape in self.products)
        shape = self.attention
        forward = 2 * shape.heads * shape.queries * shape.keys * (shape.depth + shape.value_depth)
        return forward * (2.5 if shape.backward else 1) / (2 if shape.causal else 1)

    def predicted_s(self, device: Device) -> float:
        """The cost model's time of our kernel, in seconds."""
        if self.attention is not None:
            return attention_time(self.attention, "bf16", device)
        if self.products:
            return sum(matmul_time(*shape, "bf16", device) for shape in self.products)
        return device.launch_latency_s + memory_time(self.moved_bytes, device)

    def run_plain(self, plain: Callable[[], Any]) -> Any:
        """Run `plain`, or a compiled form of it, and also its gradients if the case has leaves."""
        result = plain()
        return torch.autograd.grad(result, self.leaves, self.grad) if self.leaves else result


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normally distributed numbers, on the default device."""
    return torch.randn(shape, dtype=dtype)


def bytes_of(*tensors: Tensor) -> int:
    """Bytes of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def form(operator: Any, index: int = 0) -> Callable[..., Any]:
    """The form with this index of a fused kernel, as a function."""
    return next(kernel for kernel in FUSED if kernel.operator is operator).forms[index].compose
