"""Where a custom operator comes from."""

from __future__ import annotations

from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload


def defining_module(operator: OpOverload) -> str | None:
    """The module whose function a `torch.library.custom_op` decorates; None for operators that came otherwise."""
    definition = OPDEFS.get(operator._schema.name)
    return None if definition is None else definition._init_fn.__module__
