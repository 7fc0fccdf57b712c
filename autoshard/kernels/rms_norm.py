"""The backward of `aten::_fused_rms_norm` on CPUs, which torch lacks.

Lowered programs keep `aten::_fused_rms_norm` as one operator, so its backward must run on CPUs too.
Zhang, Sennrich, "Root mean square layer normalization" (NeurIPS 2019). C columns, n = x rstd, g = dout w:

    rstd = 1 / sqrt(mean_c x_c^2 + eps)
    dx   = rstd (g - n mean_c(g n)),    dw = sum over rows of dout n

Torch (2.11 to 2.13) traces `aten::_fused_rms_norm_backward`, but runs it only on GPUs. Importing this module registers
the formula for CPU tensors, unless torch itself has a CPU kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.library import Library

from autoshard.kernels.library import accumulation_dtype


def rms_norm_composite(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    """Compute both results of `aten::_fused_rms_norm`, out and rstd, with operators that torch can differentiate.

    Args:
        x: the input, whose last dims have the sizes `normalized_shape`.
        weight: a tensor of shape `normalized_shape`, or None.
        eps: added to the mean of squares. None stands for `torch.finfo(dtype).eps` of the accumulation dtype.
    """
    values = x.to(accumulation_dtype(x.dtype))
    eps = torch.finfo(values.dtype).eps if eps is None else eps
    dims = list(range(-len(normalized_shape), 0))
    rstd = torch.rsqrt(values.square().mean(dims, keepdim=True) + eps)
    normed = values * rstd
    return (normed if weight is None else normed * weight.to(values.dtype)).to(x.dtype), rstd


def rms_norm_backward_reference(
    grad_out: Tensor,
    x: Tensor,
    normalized_shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of x and of the weight, in their shapes and dtypes, or None where `output_mask` is False.

    Args:
        grad_out: the gradient of the first result, with the shape of x.
        x: the forward's input, [*, C]. C stands for all dims of `normalized_shape`.
        rstd: [*, 1], the forward's second result.
        output_mask: whether the gradient of x is needed, and whether the gradient of the weight is needed.
    """
    columns = math.prod(normalized_shape)
    dtype = accumulation_dtype(x.dtype)
    grad = grad_out.reshape(-1, columns).to(dtype)
    normed = x.reshape(-1, columns).to(dtype) * rstd.reshape(-1, 1).to(dtype)
    weighted = grad if weight is None else grad * weight.reshape(columns).to(dtype)
    dx = dw = None
    if output_mask[0]:
        projection = (weighted * normed).mean(dim=1, keepdim=True)
        dx = ((weighted - normed * projection) * rstd.reshape(-1, 1).to(dtype)).to(x.dtype).reshape(x.shape)
    if output_mask[1] and weight is not None:
        dw = (grad * normed).sum(dim=0).to(weight.dtype).reshape(weight.shape)
    return dx, dw


def _torch_has_it() -> bool:
    one = torch.ones(1, 1)
    try:
        torch.ops.aten._fused_rms_norm_backward.default(one, one, [1], one, None, [True, False])
    except NotImplementedError:
        return False
    return True


_LIBRARY = Library("aten", "IMPL", "CPU")
if not _torch_has_it():
    _LIBRARY.impl("_fused_rms_norm_backward", rms_norm_backward_reference)
