"""The native operator of `autoshard::dequantize_nf4`: on a GPU the Triton kernel, elsewhere the definition."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from autoshard.kernels.dequantize import ARGUMENTS, QuantizedWeight, dequantize_nf4_reference, fake_weights
from autoshard.kernels.launch import why_not
from autoshard.kernels.library import define
from autoshard.kernels.triton_dequantize import triton_dequantize_nf4


def native_dequantize_nf4(*operands: Any) -> Tensor:
    """Return the dequantised weights [*shape]. `operands` are the fields of `QuantizedWeight`."""
    on_gpu = QuantizedWeight(*operands).packed.is_cuda and why_not(triton_dequantize_nf4, *operands) is None
    return triton_dequantize_nf4(*operands) if on_gpu else dequantize_nf4_reference(*operands)


native = define("native_dequantize_nf4", ARGUMENTS, native_dequantize_nf4, fake_weights)
