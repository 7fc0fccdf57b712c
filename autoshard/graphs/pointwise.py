"""Tells operators that compute each element of their result from the elements at the same place."""

from __future__ import annotations

import torch


def is_pointwise(target: object) -> bool:
    """Whether `target` is an operator that computes each result element from elements at the same place (torch's tag).

    Example:
        >>> is_pointwise(torch.ops.aten.add.Tensor), is_pointwise(torch.ops.aten.mm.default)
        (True, False)
    """
    return torch.Tag.pointwise in getattr(target, "tags", ())
