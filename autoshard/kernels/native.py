"""The table of native operators, which take the arguments of semantic operators and call torch's fused kernels.

A semantic operator computes its definition in plain PyTorch. The pass `passes.lowering.select_kernels` replaces it by
its native operator, unless `backend="reference"`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torch._ops import OpOverload

from autoshard.kernels import native_attention, native_cross_entropy, native_dequantize
from autoshard.kernels.attention import attention, attention_backward
from autoshard.kernels.cross_entropy import cross_entropy, cross_entropy_backward
from autoshard.kernels.dequantize import dequantize_nf4
from autoshard.kernels.split_cross_entropy import split_cross_entropy, split_cross_entropy_backward

NATIVE: Mapping[OpOverload, OpOverload] = MappingProxyType(
    {
        attention: native_attention.native,
        attention_backward: native_attention.native_backward,
        cross_entropy: native_cross_entropy.native,
        cross_entropy_backward: native_cross_entropy.native_backward,
        dequantize_nf4: native_dequantize.native,
        split_cross_entropy: native_cross_entropy.native_split,
        split_cross_entropy_backward: native_cross_entropy.native_split_backward,
    },
)
SEMANTIC: Mapping[OpOverload, OpOverload] = MappingProxyType({made: meant for meant, made in NATIVE.items()})
