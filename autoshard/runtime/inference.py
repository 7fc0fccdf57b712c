"""`in_normal_mode`: make tensors that outlive a call outside of `torch.inference_mode`, so that training can follow."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def in_normal_mode(function: Callable[P, T]) -> Callable[P, T]:
    """Return `function` changed to run outside of inference mode, so that autograd can use tensors that it makes."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        grad = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.set_grad_enabled(grad):
            return function(*args, **kwargs)

    return run
