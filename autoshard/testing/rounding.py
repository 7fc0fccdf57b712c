"""Move numbers by one rounding. One device's results for moved numbers show how far rounding may change a result."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree


def nudge(values: Any, number: int, eps: float = 0.0) -> Any:
    """Return a tree of values whose floating tensors have each element moved by one rounding, up or down.

    `number` is the seed of the directions. `eps` is the machine epsilon of a compute dtype that is narrower than the
    tensors' own.
    """
    generator = torch.Generator().manual_seed(number)

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
            return leaf
        signs = torch.randint(0, 2, leaf.shape, generator=generator).to(leaf) * 2 - 1
        return leaf * (1 + signs * max(eps, torch.finfo(leaf.dtype).eps) / 2)

    return pytree.tree_map(move, values)
