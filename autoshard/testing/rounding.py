"""Move numbers by one rounding: `nudge`.

The results of one device for moved parameters and inputs show how far rounding may change a result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree


def nudge(values: Any, number: int, eps: float = 0.0) -> Any:
    """Return `values`, a tree of tensors, with each floating element moved by one rounding, up or down.

    Args:
        number: the seed that draws up or down for each element.
        eps: the machine epsilon of a compute dtype that is narrower than the tensors' dtype; 0 without such a dtype.
    """
    generator = torch.Generator().manual_seed(number)

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
            return leaf
        signs = torch.randint(0, 2, leaf.shape, generator=generator).to(leaf) * 2 - 1
        return leaf * (1 + signs * max(eps, torch.finfo(leaf.dtype).eps) / 2)

    return pytree.tree_map(move, values)
