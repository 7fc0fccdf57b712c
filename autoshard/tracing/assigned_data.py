"""Turns assignments to the `.data` of a tensor into copies, which a trace sees.

Momentum encoders make such assignments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autoshard.errors import TraceError

_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class WriteAssignedData(TorchFunctionMode):
    """Makes `tensor.data = value` copy `value` into `tensor` while the mode is active. A trace sees the copy.

    The assignment raises TraceError if shapes or dtypes differ.
    """

    def __torch_function__(
        self, func: Callable, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func != _SET_DATA:
            return func(*args, **(kwargs or {}))
        tensor, value = args
        if (tensor.shape, tensor.dtype) != (value.shape, value.dtype):
            raise TraceError(
                f"The model sets .data of a tensor of shape={tuple(tensor.shape)}, {tensor.dtype}, to one of "
                f"shape={tuple(value.shape)}, {value.dtype}, in forward; a program keeps shapes and types. Assign the "
                "tensor itself, or set .data between calls."
            )
        with torch.no_grad():
            tensor.detach().copy_(value)
        return None
