"""Precisions by name: the floating-point type of a model's computation, narrower than the parameters' types.

Parameters keep their types, and the optimizer updates them (master weights). The program casts the parameters before it
computes with them. The page is docs/reference/precision.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn

from autoshard.errors import NotAvailableError, PlanMismatchError

PRECISIONS: Mapping[str, torch.dtype] = MappingProxyType(
    {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
)

_SPELLINGS: Mapping[str, str] = MappingProxyType(
    {str(dtype).removeprefix("torch."): name for name, dtype in PRECISIONS.items()}
    | {name: name for name in PRECISIONS}
    | {"fp16": "f16", "half": "f16", "fp32": "f32", "float": "f32", "16": "f16", "32": "f32"}
    | {"16-mixed": "f16", "bf16-mixed": "bf16", "bf16-true": "bf16", "16-true": "f16", "32-true": "f32"}
)
"""Name of a precision in other libraries, without "torch." and in lower case → its name in `PRECISIONS`."""


def is_wider(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether a tensor has a floating-point type of more bits than `dtype`."""
    return tensor.is_floating_point() and tensor.dtype.itemsize > dtype.itemsize


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor converted to `dtype` if its floating-point type is wider; otherwise the tensor itself.

    Example:
        >>> cast(torch.ones(2), torch.bfloat16).dtype, cast(torch.arange(2), torch.bfloat16).dtype
        (torch.bfloat16, torch.int64)
    """
    return tensor.to(dtype) if is_wider(tensor, dtype) else tensor


def widen(tensor: Tensor) -> Tensor:
    """Return a floating-point tensor narrower than float32 as float32, and any other tensor as it is."""
    is_narrow = tensor.is_floating_point() and tensor.dtype.itemsize < torch.float32.itemsize
    return tensor.to(torch.float32) if is_narrow else tensor


def effective_precision(model: nn.Module, precision: str | None) -> str | None:
    """Return `precision` if some parameter of `model` is wider; else None: the model computes in its own types.

    Raises `NotAvailableError` if the precision is unknown, or if some parameter has another type and no parameter is
    wider.
    """
    if precision is None:
        return None
    if not isinstance(precision, str) or precision not in PRECISIONS:
        meant = _SPELLINGS.get(str(precision).removeprefix("torch.").lower())
        suggestion = "" if meant is None else f" Did you mean {meant!r}?"
        raise NotAvailableError(
            f"precision={precision!r} is unknown; use {', '.join(map(repr, PRECISIONS))}, or None for the model's own "
            f"types.{suggestion}"
        )
    dtype = PRECISIONS[precision]
    floating = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
    if any(is_wider(parameter, dtype) for parameter in floating):
        return precision
    others = {parameter.dtype for parameter in floating} - {dtype}
    if others:
        raise NotAvailableError(
            f"precision={precision!r} narrows wider parameters, and this model's are {', '.join(map(str, others))}. "
            f"Convert it with model.to({dtype}), or pass precision=None to compute in its own types."
        )
    return None


def check_precision(precision: str | None) -> None:
    """Raise `PlanMismatchError` unless the precision of a plan's file is null or has a known name."""
    if precision not in (None, *PRECISIONS):
        known = ", ".join(map(repr, PRECISIONS))
        raise PlanMismatchError(f"'precision' is {precision!r} in the plan; it must be null or of {known}.")
