"""`autoshard::to_host` and `autoshard::from_host`: move a value from its device to the host's memory, and back.

On an accelerator, the copies use pinned memory and the current stream, and the host does not wait for them. On a CPU,
each operator only makes a copy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autoshard.kernels.library import define


def _to_host(x: Tensor) -> Tensor:
    """Start to copy `x` to pinned host memory, and return the copy. It has the strides of `x`.

    A tensor on the CPU is cloned.
    """
    if x.device.type == "cpu":
        return x.clone()
    return torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)


def _from_host(x: Tensor) -> Tensor:
    """Start to copy a pinned `x` to the current accelerator. If `x` is not pinned, return a copy on the CPU.

    Only `_to_host` of an accelerator's tensor returns pinned memory.
    """
    if not x.is_pinned():
        return x.clone()
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None, "memory is pinned for an accelerator"
    device = torch.device(accelerator.type, torch.accelerator.current_device_index())
    return torch.empty_like(x, device=device, pin_memory=False).copy_(x, non_blocking=True)


def _fake(x: Tensor) -> Tensor:
    return torch.empty_like(x)


to_host = define("to_host", "(Tensor x) -> Tensor", _to_host, _fake)
from_host = define("from_host", "(Tensor x) -> Tensor", _from_host, _fake)

TRANSFERS = (to_host, from_host)
"""The operators that change a value's device but not its elements."""
