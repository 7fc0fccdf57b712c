"""Lookup of the Python module that defines a custom operator."""

from __future__ import annotations

from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload


def defining_module(operator: OpOverload) -> str | None:
    """Return the name of the module that defines a `torch.library.custom_op`; None for any other operator."""
    definition = OPDEFS.get(operator._schema.name)
    return None if definition is None else definition._init_fn.__module__
