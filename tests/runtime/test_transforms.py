"""Transforms of `torch.func` around a compiled call raise an error that names an alternative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import func, nn
from torch.autograd import forward_ad

import autoshard

Compiled = Callable[..., torch.Tensor]


def _forward_mode(compiled: Compiled, x: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        return compiled(forward_ad.make_dual(x, x))


USES: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "vmap": lambda compiled, x: func.vmap(compiled)(x),
    "grad": lambda compiled, x: func.grad(lambda y: compiled(y).sum())(x),
    "jacrev": lambda compiled, x: func.jacrev(compiled)(x),
    "forward mode": _forward_mode,
    "grad of parameters": lambda compiled, x: func.grad(lambda held: func.functional_call(compiled, held, (x,)).sum())(
        dict(compiled.named_parameters())
    ),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # of forward_ad itself
@pytest.mark.parametrize("name", USES)
def test_transforms_are_refused(name: str) -> None:
    """A transform around a compiled call raises, and `torch.autograd.grad`, which the error names, works."""
    compiled, x = autoshard.compile(nn.Linear(4, 2), autoshard.Mesh({"data": 2})), torch.randn(6, 4)
    with pytest.raises(autoshard.NotAvailableError, match=r"vmap, grad.*use torch\.autograd\.grad"):
        USES[name](compiled, x)
    assert torch.autograd.grad(compiled(x.requires_grad_()).sum(), x)[0].shape == x.shape
