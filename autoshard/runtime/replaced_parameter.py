"""Parameters whose place a DTensor took: objects that optimizers and users hold from before `compile`.

A plain `nn.Parameter` cannot become a DTensor: Python's layouts of the two classes differ, so
`torch.utils.swap_tensors` refuses them. The object from before stands for its successor instead: torch's functions,
and its attributes (`grad`, `data`, `shape`), are those of the successor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from autoshard.errors import TraceError


class ReplacedParameter(nn.Parameter):
    """A parameter from before `compile`; every function of torch that takes it takes its successor."""

    _successor: torch.Tensor

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        positional = tree_map_only(cls, successor_of, tuple(args))
        return func(*positional, **tree_map_only(cls, successor_of, dict(kwargs or {})))


def stand_for(parameter: nn.Parameter, successor: torch.Tensor) -> None:
    """Let `parameter` stand for `successor` from now on.

    Raises:
        TraceError: `parameter` is of a class whose objects cannot.
    """
    try:
        parameter.__class__ = ReplacedParameter
    except TypeError as error:
        raise TraceError(
            f"A parameter of shape={tuple(parameter.shape)} is a {type(parameter).__qualname__}, and optimizers from "
            "before compile would go on holding it. With processes, use nn.Parameter."
        ) from error
    vars(parameter)["_successor"] = successor


def successor_of(tensor: torch.Tensor) -> torch.Tensor:
    """The parameter that took the place of `tensor`, or `tensor` where none did."""
    return vars(tensor)["_successor"] if isinstance(tensor, ReplacedParameter) else tensor
