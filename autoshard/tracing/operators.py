"""The origin of custom operators."""

from __future__ import annotations

from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload


def defining_module(operator: OpOverload) -> str | None:
    """The module of the function under `torch.library.custom_op`; None for operators of another origin."""
    definition = OPDEFS.get(operator._schema.name)
    return None if definition is None else definition._init_fn.__module__
