"""Parameter objects from before `compile`, which optimizers and users still hold, act as the DTensors in use now.

A plain `nn.Parameter` cannot become a DTensor (`torch.utils.swap_tensors` refuses it). So torch's functions and the
attributes (`grad`, `data`, `shape`) of the old object act on its successor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from autoshard.errors import TraceError


class ReplacedParameter(nn.Parameter):
    """A parameter from before `compile`. Torch functions of the parameter act on its successor, a DTensor."""

    _successor: torch.Tensor

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        positional = tree_map_only(cls, successor_of, tuple(args))
        return func(*positional, **tree_map_only(cls, successor_of, dict(kwargs or {})))


def stand_for(parameter: nn.Parameter, successor: torch.Tensor) -> None:
    """Make `parameter` a `ReplacedParameter` with this successor, from now on.

    Raises:
        TraceError: Python cannot change the parameter's class.
    """
    try:
        parameter.__class__ = ReplacedParameter
    except TypeError as error:
        raise TraceError(
            f"A parameter of shape={tuple(parameter.shape)} is a {type(parameter).__qualname__}, which cannot become a "
            "DTensor, so optimizers from before compile would keep the old one. With processes, use nn.Parameter."
        ) from error
    vars(parameter)["_successor"] = successor


def successor_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the DTensor that replaced the parameter `tensor` in `compile`; `tensor` itself if none did."""
    return vars(tensor)["_successor"] if isinstance(tensor, ReplacedParameter) else tensor
