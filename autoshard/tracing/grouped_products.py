"""Computes the result's shape and strides of `aten::_grouped_mm` on meta and fake tensors.

Importing this module replaces torch's meta kernel, which accepts only bfloat16, by a function that also accepts float32
and float16. Rows of the result begin at multiples of 16 bytes, like rows of torch's products on the CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import DispatchKey

_OPERATOR = torch.ops.aten._grouped_mm.default
_TYPES = (torch.float32, torch.float16, torch.bfloat16)
_REGISTERED = torch.library.Library("aten", "IMPL", "Meta")
_ALIGNED_BYTES = 16


def _on_meta(
    left: Tensor,
    right: Tensor,
    ends: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    _check(left.dtype in _TYPES, f"an operand is {left.dtype}; it takes float32, float16 and bfloat16")
    _check(right.dtype == left.dtype, f"the operands are {left.dtype} and {right.dtype}; make both one type")
    _check(out_dtype in (None, left.dtype), f"out_dtype={out_dtype} is not the type of the operands, {left.dtype}")
    _check(bias is None, "a bias is given; add it to the result")
    _check({left.dim(), right.dim()} <= {2, 3}, "each operand has two dims or three")
    is_flat = left.dim() == 2, right.dim() == 2
    _check(any(is_flat) == (ends is not None), "offs is given exactly where an operand has two dims")
    _check(ends is None or (ends.dim() == 1 and ends.dtype == torch.int32), "offs has one dim, of type int32")
    shapes = f"shapes {tuple(left.shape)} and {tuple(right.shape)}"
    _check(left.size(-1) == right.size(-2), f"of {shapes} the inner sizes differ")
    groups = {x.size(0) for x in (left, right) if x.dim() == 3} | ({ends.size(0)} if ends is not None else set())
    _check(len(groups) == 1, f"{shapes} and offs are of {sorted(groups)} groups")
    _check(all(_is_aligned(x) for x in (left, right)), "rows (or columns) of an operand do not begin at whole 16 bytes")
    lead = groups if all(is_flat) or not any(is_flat) else ()
    count = _ALIGNED_BYTES // left.element_size()
    padded = -(-right.size(-1) // count) * count
    rows = left.size(-2)
    stride = (rows * padded, padded, 1)
    return left.new_empty_strided((*lead, rows, right.size(-1)), stride if lead else stride[1:])


def _is_aligned(x: Tensor) -> bool:
    inner, outer = sorted(x.stride()[-2:])
    return inner == 1 and outer * x.element_size() % _ALIGNED_BYTES == 0


def _check(holds: bool, problem: str) -> None:
    torch._check(holds, lambda: f"grouped_mm: {problem}")


_OPERATOR.py_kernels.pop(DispatchKey.Meta, None)
_OPERATOR.py_impl(DispatchKey.Meta)(_on_meta)
_OPERATOR._dispatch_cache.clear()
_REGISTERED.impl("_grouped_mm", _on_meta, allow_override=True)
