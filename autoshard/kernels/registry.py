"""The tables of Triton kernels: `KERNELS` for one operator each, `FUSED` for several operators at once.

To use a kernel for one operator, a pass changes only the target of a node to the operator in `KERNELS`. It has the same
arguments and results. Results may have wider dtypes: statistics are float32 where ATen's have 16 bits. Importing this
module imports triton and defines the operators `autoshard::triton_*`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from torch._ops import OpOverload

from autoshard.kernels import (
    triton_cross_entropy,
    triton_dequantize,
    triton_dropout,
    triton_gated,
    triton_gelu,
    triton_linear_cross_entropy,
    triton_norm_forms,
    triton_norms,
    triton_rotary,
    triton_split_cross_entropy,
)
from autoshard.kernels.kernel import FusedKernel
from autoshard.kernels.launch import why_not

# From an operator to the operator that runs its kernel.
KERNELS: Mapping[OpOverload, OpOverload] = MappingProxyType(
    triton_cross_entropy.KERNELS
    | triton_dequantize.KERNELS
    | triton_dropout.KERNELS
    | triton_norms.KERNELS
    | triton_split_cross_entropy.KERNELS
)

# Kernels for several operators at once, in the order of the search: larger patterns before their parts.
FUSED: tuple[FusedKernel, ...] = (
    *triton_norm_forms.FUSED,
    *triton_gated.FUSED,
    *triton_gelu.FUSED,
    *triton_linear_cross_entropy.FUSED,
    *triton_rotary.FUSED,
)


def find_kernel(
    operator: OpOverload, args: Sequence[object], kwargs: Mapping[str, object] = MappingProxyType({})
) -> OpOverload | None:
    """Return the operator of the kernel that applies to a call, or None.

    Tensors among the arguments may be real, fake or meta tensors.

    Example:
        >>> import torch
        >>> x = torch.empty(4, 8, device="meta")
        >>> find_kernel(torch.ops.aten._fused_rms_norm.default, (x, [8], None, 1e-6)).name()
        'autoshard::triton_rms_norm'
        >>> find_kernel(torch.ops.aten._fused_rms_norm.default, (x.double(), [8], None, 1e-6)) is None
        True
    """
    kernel = KERNELS.get(operator)
    return kernel if kernel is not None and why_not(kernel, *args, **kwargs) is None else None
