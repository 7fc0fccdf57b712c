"""Semantic operators under `torch.func` (`vmap`, `grad`, `jvp`, `hessian`) and forward-mode differentiation.

A transform processes a call operator by operator, and has no rule for ours. Under it, composites replace them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch._ops import OpOverload
from torch.autograd import forward_ad

from autoshard.kernels.library import composite_of


def call_operator(overload: OpOverload, *args: Any) -> tuple[Tensor, ...]:
    """A semantic operator's results; under a transform its composite's differentiable results."""
    return composite_of(overload)(*args) if is_transformed() else overload(*args)


def is_transformed() -> bool:
    """Whether a transform of `torch.func`, or forward-mode differentiation, is at work."""
    return peek_interpreter_stack() is not None or forward_ad._current_level >= 0
