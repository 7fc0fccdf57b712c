"""`StepLoss`: the loss that a step returns. Its `backward` raises an error, because the step has run the backward.

A scaled loss (`loss / 4`, or from a `GradScaler`) raises the error too. Any other result of the loss is a plain tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autoshard.errors import NotAvailableError

_SCALES = frozenset(
    {"mul", "multiply", "div", "divide", "true_divide", "__mul__", "__rmul__", "__truediv__", "sum", "mean"}
)


class StepLoss(torch.Tensor):
    """The loss of a step, a scalar. Its `backward` raises an error, because the step has run the backward."""

    @classmethod
    def of(cls, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss as a `StepLoss`. A tensor of another class, such as a fake tensor, is returned as it is."""
        if type(loss) is not torch.Tensor:
            return loss
        made = loss.as_subclass(cls)
        vars(made)["plain"] = loss
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a torch function on the loss as a plain tensor; raise an error if the function is a backward."""
        args, keywords = pytree.tree_map_only(StepLoss, lambda loss: vars(loss)["plain"], (args, dict(kwargs or {})))
        if func in _BACKWARDS and not any(
            leaf.requires_grad for leaf in pytree.tree_leaves(args[:1]) if isinstance(leaf, torch.Tensor)
        ):
            raise NotAvailableError(
                "loss.backward(): the step has already run the backward, and the optimizer's update. Leave "
                "loss.backward() and optimizer.step() out; or compile without optimizer= for a loop of your own."
            )
        result = func(*args, **keywords)
        is_scaled = func.__name__ in _SCALES and isinstance(result, torch.Tensor) and not result.requires_grad
        return cls.of(result) if is_scaled else result


_BACKWARDS = frozenset({torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad})
