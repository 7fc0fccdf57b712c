"""The torch library "autoshard": how its operators are defined.

An operator is a schema, an implementation in plain PyTorch that runs on every backend, and a shape function
for fake tensors. It is opaque to tracing (`CompositeExplicitAutograd`), functional, and no output aliases an
input.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.library import Library

NAMESPACE = "autoshard"

# Operators live as long as the library object that defined them.
_LIBRARY = Library(NAMESPACE, "FRAGMENT")
_IMPLEMENTATIONS: dict[torch._ops.OpOverload, Callable[..., object]] = {}


def define(
    name: str, schema: str, implementation: Callable[..., object], fake: Callable[..., object]
) -> torch._ops.OpOverload:
    """Define `autoshard::name` and return its default overload.

    Args:
        name: the operator's name, without the namespace.
        schema: arguments and returns, e.g. `"(Tensor x) -> Tensor"`.
        implementation: plain PyTorch, on any device; outputs alias no input.
        fake: same arguments, gives empty tensors of the right shape, dtype and device.

    Returns:
        `torch.ops.autoshard.<name>.default`.
    """
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    overload = getattr(getattr(torch.ops, NAMESPACE), name).default
    _IMPLEMENTATIONS[overload] = implementation
    return overload


def implementation_of(overload: torch._ops.OpOverload) -> Callable[..., object]:
    """The function in plain PyTorch that an operator of this library runs."""
    return _IMPLEMENTATIONS[overload]


def differentiate(
    overload: torch._ops.OpOverload, setup_context: Callable[..., None], backward: Callable[..., object]
) -> None:
    """Give an operator its derivative: `setup_context` saves what `backward` needs."""
    torch.library.register_autograd(overload, backward, setup_context=setup_context, lib=_LIBRARY)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums are kept: float64 for float64, float32 for all narrower floats."""
    return torch.float64 if dtype == torch.float64 else torch.float32
