"""The tables of Triton kernels: `KERNELS` for one operator each, `FUSED` for several operators at once.

To use a kernel for one operator, a pass changes only the target of a node to `Kernel.replacement`. Importing this
module imports triton and defines the replacements as operators `autoshard::triton_*`. For unsupported operands, a
replacement raises `KernelError`, and never falls back to another implementation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from torch._ops import OpOverload

from autoshard.kernels import (
    biased_product,
    triton_add_norm,
    triton_bias_add_norm,
    triton_cross_entropy,
    triton_dequantize,
    triton_dropout,
    triton_gated,
    triton_gelu,
    triton_layer_norm,
    triton_linear_cross_entropy,
    triton_rms_norm,
    triton_rotary,
    triton_softmax,
    triton_split_cross_entropy,
)
from autoshard.kernels.kernel import FusedKernel, Kernel

_MODULES = (
    triton_cross_entropy,
    triton_dequantize,
    triton_dropout,
    triton_layer_norm,
    triton_rms_norm,
    triton_softmax,
    triton_split_cross_entropy,
)
_FUSED_MODULES = (
    triton_bias_add_norm,
    triton_add_norm,
    triton_gated,
    triton_gelu,
    triton_linear_cross_entropy,
    triton_rotary,
    biased_product,
)


def _tabulate(kernels: Iterable[Kernel]) -> Mapping[OpOverload, tuple[Kernel, ...]]:
    table: dict[OpOverload, tuple[Kernel, ...]] = {}
    for kernel in kernels:
        table[kernel.operator] = (*table.get(kernel.operator, ()), kernel)
    return MappingProxyType(table)


# Each operator's kernels, the preferred one first.
KERNELS = _tabulate(kernel for module in _MODULES for kernel in module.KERNELS)


# Kernels for several operators at once, in the order of the search: larger patterns before their parts.
FUSED: tuple[FusedKernel, ...] = tuple(kernel for module in _FUSED_MODULES for kernel in module.FUSED)


def kernels_of(operator: OpOverload) -> tuple[Kernel, ...]:
    """Return the kernels that may replace an operator, the preferred kernel first, or an empty tuple."""
    return KERNELS.get(operator, ())


def find_kernel(
    operator: OpOverload, args: Sequence[object], kwargs: Mapping[str, object] | None = None
) -> Kernel | None:
    """Return the first kernel that applies to a call, or None.

    Tensors among the arguments may be real, fake or meta tensors.

    Example:
        >>> import torch
        >>> x = torch.empty(4, 8, device="meta")
        >>> find_kernel(torch.ops.aten._softmax.default, (x, -1, False)).replacement.name()
        'autoshard::triton_softmax'
        >>> find_kernel(torch.ops.aten._softmax.default, (x, 0, False)) is None
        True
    """
    for kernel in kernels_of(operator):
        if kernel.why_not(*args, **(kwargs or {})) is None:
            return kernel
    return None
