"""One rank of `tests.benchmarks.step_time`, which runs contenders in turns, and counts bytes and memory.

Bytes on the wire are the bytes that this process received in a step, by the kernel's TCP counters of all its sockets.
The bytes include Gloo's gradients, parameters and activations, and other messages between ranks.

Peak memory is measured for a contender in its own processes. The first part is the large allocations (64 KiB and more)
that live between two steps, by the C library's count. The second part is the growth of the resident set within a step.
Python's own objects are left out.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import socket
import struct
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.benchmarks.races import serve, take_turns

_BATCHES = 4
_TCP_BYTES_RECEIVED = 128
"""Offset in the kernel's `struct tcp_info`, in bytes."""


def _received_bytes() -> int:
    """Bytes that this process's TCP sockets have received."""
    total = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if not os.readlink(entry).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as found:
                if found.family not in (socket.AF_INET, socket.AF_INET6) or found.type != socket.SOCK_STREAM:
                    continue
                info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:
            continue
        total += struct.unpack_from("Q", info, _TCP_BYTES_RECEIVED)[0]
    return total


class _Mallinfo(ctypes.Structure):
    """The result of `mallinfo2`: ten sizes, the fifth of large allocations."""

    _fields_ = (("before", ctypes.c_size_t * 4), ("hblkhd", ctypes.c_size_t), ("after", ctypes.c_size_t * 5))


def _large_allocations_bytes() -> int:
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Mallinfo
    return mallinfo().hblkhd


def _status_bytes(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, "Linux says it"
    return int(found[1]) * 1024


def _peak_bytes(step: Any, batch: Any) -> int:
    """Return the bytes that live between steps, and the further bytes of a step."""
    gc.collect()
    held = _large_allocations_bytes()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_bytes("VmRSS")
    step(batch)
    return held + max(0, _status_bytes("VmHWM") - before)


def _received_in(step: Any, batch: Any) -> int:
    """Bytes received in one step."""
    import torch.distributed as dist

    dist.barrier()
    time.sleep(0.1)
    before = _received_bytes()
    step(batch)
    time.sleep(0.1)
    return _received_bytes() - before


def _collectives(step: Any, batch: Any) -> dict[str, int]:
    """How often a step calls each collective, by torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step(batch)
    counts = Counter(event.name for event in profiler.events() or () if event.name.startswith("gloo:"))
    return dict(sorted(counts.items()))


def _maximum(value: int) -> int:
    import torch
    import torch.distributed as dist

    found = torch.tensor(value)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found.item())


def _mean_loss(loss: Any) -> float:
    """The mean of the ranks' losses, each of which may be of its own rows."""
    import torch.distributed as dist

    total = loss.detach().double()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def _run(order: dict[str, Any]) -> dict[str, Any]:
    """Run `order` on this rank."""
    from tests.benchmarks.step_cases import Case, make_batches
    from tests.benchmarks.step_contenders import make_step

    case = Case(**order["case"])
    batches = make_batches(case, _BATCHES)
    steps = {name: make_step(name, case, batches[0]) for name in order["contenders"]}
    found = take_turns(steps, batches, 0 if order["memory"] else order["rounds"], _mean_loss)
    for name, step in steps.items():
        if order["memory"]:
            found[name]["peak_bytes"] = _maximum(max(_peak_bytes(step, batch) for batch in batches[:2]))
        else:
            found[name]["received_bytes"] = _maximum(_received_in(step, batches[0]))
            found[name]["collectives"] = _collectives(step, batches[0])
    return found


if __name__ == "__main__":
    serve(_run)
