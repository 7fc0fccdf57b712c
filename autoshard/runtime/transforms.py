"""Refuse compiled calls under the transforms of `torch.func`, and under forward-mode differentiation."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.autograd import forward_ad

from autoshard.errors import NotAvailableError


def refuse_transforms(tensors: Iterable[torch.Tensor]) -> None:
    """Raise `NotAvailableError` if a transform replaced one of the tensors, because it cannot see into a program."""
    for tensor in tensors:
        if torch.func.debug_unwrap(tensor) is not tensor or forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotAvailableError(
                "torch.func (vmap, grad, jvp, jacrev) and forward-mode differentiation cannot transform a compiled "
                "call, which runs a program of its own. Apply the transform in the forward of the model that you "
                "compile. For gradients of a compiled call, use torch.autograd.grad."
            )
