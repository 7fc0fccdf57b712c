"""Semantic operators under `torch.func` (`vmap`, `grad`, `jvp`, `hessian`) and forward-mode differentiation.

A transform has a rule for each operator of torch, and none for semantic operators (`autoshard::*`). So under a
transform the composite of a semantic operator runs, which is its definition by operators of torch.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch._ops import OpOverload
from torch.autograd import forward_ad

from autoshard.kernels.library import composite_of


def call_operator(overload: OpOverload, *args: Any) -> tuple[Tensor, ...]:
    """Call a semantic operator, and return its results.

    Under a transform, call its composite, made of torch's operators.
    """
    return composite_of(overload)(*args) if is_transformed() else overload(*args)


def is_transformed() -> bool:
    """Whether the running code is inside a transform of `torch.func`, or inside forward-mode differentiation."""
    return peek_interpreter_stack() is not None or forward_ad._current_level >= 0
