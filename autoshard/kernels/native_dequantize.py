"""The native operator of `autoshard::dequantize_nf4`: on a GPU the Triton kernel, elsewhere the definition."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autoshard.kernels.dequantize import ARGUMENTS, dequantize_nf4_reference, fake_weights
from autoshard.kernels.library import define
from autoshard.kernels.triton_dequantize import triton_dequantize_nf4, why_not_dequantize


def native_dequantize_nf4(
    packed: Tensor,
    absmax: Tensor,
    nested: Tensor | None,
    shape: Sequence[int],
    blocksize: int,
    first_block: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return the weights. The arguments are those of `dequantize_nf4_reference`."""
    given = (packed, absmax, nested, shape, blocksize, first_block, dtype)
    on_gpu = packed.is_cuda and why_not_dequantize(*given) is None
    return triton_dequantize_nf4(*given) if on_gpu else dequantize_nf4_reference(*given)


native = define("native_dequantize_nf4", ARGUMENTS, native_dequantize_nf4, fake_weights)
