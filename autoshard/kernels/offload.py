"""`autoshard::to_host` and `autoshard::from_host`: they move a value to the memory of its device's host, and back.

On an accelerator, the copies use pinned memory and are queued on the computing stream. Later operators wait for them,
but the host does not. On a CPU, whose memory is the host's, each makes a copy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autoshard.kernels.library import define


def _to_host(x: Tensor) -> Tensor:
    """The value in the host's memory, with the strides of `x`."""
    if x.device.type == "cpu":
        return x.clone()
    return torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)


def _from_host(x: Tensor) -> Tensor:
    """The value from `to_host`, moved back to the current accelerator if it came from one."""
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
"""The operators that change the device of a value and not the value itself."""
