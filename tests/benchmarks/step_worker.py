"""One rank of `tests.benchmarks.step_time`: runs contenders in turns, and counts bytes and memory. Started by it.

Bytes on the wire are those that the kernel's TCP counters say this process received in a step, over all its sockets:
what Gloo moved for gradients, parameters and activations, and what ranks tell each other beside.

Peak memory is a contender's alone, in processes of its own: large allocations (64 KiB and more) that live between two
steps, by the C library's count, and the growth of the resident set within a step. Python's own objects are not in it.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import socket
import struct
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

_WARM_UP, _BATCHES = 2, 4
_TCP_BYTES_RECEIVED = 128
"""Offset in the kernel's `struct tcp_info`, in bytes."""
MEMORY_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_MMAP_MAX_": "1000000", "MALLOC_TRIM_THRESHOLD_": "0"}
"""Every large allocation is a mapping of its own, which is counted, and given back when it is freed."""


def _pin() -> None:
    """Give this rank one core, before torch makes threads."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})


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
    """The result of `mallinfo2`: ten sizes, of which the fifth is that of large allocations."""

    _fields_ = (("before", ctypes.c_size_t * 4), ("hblkhd", ctypes.c_size_t), ("after", ctypes.c_size_t * 5))


def _large_allocations_bytes() -> int:
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Mallinfo
    return mallinfo().hblkhd


def _status_bytes(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, "Linux says it"
    return int(found[1]) * 1024


def _collectives(step: Any, batch: Any) -> dict[str, int]:
    """How often a step calls each collective, by torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step(batch)
    counts = Counter(event.name for event in profiler.events() or () if event.name.startswith("gloo:"))
    return dict(sorted(counts.items()))


def _peak_bytes(step: Any, batch: Any) -> int:
    """Bytes that live between steps, and those that a step takes beside them."""
    gc.collect()
    held = _large_allocations_bytes()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_bytes("VmRSS")
    step(batch)
    return held + max(0, _status_bytes("VmHWM") - before)


def _run(order: dict[str, Any]) -> dict[str, Any]:
    """Run `order` on this rank."""
    import torch
    import torch.distributed as dist

    from tests.benchmarks.step_cases import Case, make_batches
    from tests.benchmarks.step_contenders import make_step, time_of

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    case = Case(**order["case"])
    batches = make_batches(case, _BATCHES)
    found: dict[str, Any] = {name: {"times_s": [], "cpu_s": []} for name in order["contenders"]}
    steps = {}
    for name, result in found.items():
        started = time.perf_counter()
        steps[name] = make_step(name, case, batches[0])
        loss = steps[name](batches[0]).detach().double()
        dist.all_reduce(loss)
        result["loss"] = loss.item() / dist.get_world_size()
        result["ready_s"] = time.perf_counter() - started
        for batch in batches[:_WARM_UP]:
            steps[name](batch)
    if order["memory"]:
        for name, step in steps.items():
            found[name]["peak_bytes"] = _maximum(max(_peak_bytes(step, batch) for batch in batches[:2]))
        return found
    for index in range(order["rounds"]):
        for name in list(steps) if index % 2 else list(steps)[::-1]:
            worked = time.process_time()
            found[name]["times_s"].append(time_of(steps[name], batches[index % _BATCHES]))
            found[name]["cpu_s"].append(time.process_time() - worked)
    for name, step in steps.items():
        found[name]["received_bytes"] = _maximum(_received_in(step, batches[0]))
        found[name]["collectives"] = _collectives(step, batches[0])
        if order["profiles"]:
            _write_profile(Path(order["profiles"]), name, case, step, batches[0])
    return found


def _received_in(step: Any, batch: Any) -> int:
    """Bytes received in one step."""
    import torch.distributed as dist

    dist.barrier()
    time.sleep(0.1)
    before = _received_bytes()
    step(batch)
    time.sleep(0.1)
    return _received_bytes() - before


def _maximum(value: int) -> int:
    import torch
    import torch.distributed as dist

    found = torch.tensor(value)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found.item())


def _write_profile(folder: Path, name: str, case: Any, step: Any, batch: Any) -> None:
    """A table of operators of one step, and its trace."""
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step(batch)
    if dist.get_rank() == 0:
        stem = f"{case.model}-{case.tokens} {name}".replace(" ", "_").replace(",", "")
        table = profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=40, max_name_column_width=50)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{stem}.txt").write_text(table)
        profiler.export_chrome_trace(str(folder / f"{stem}.json"))


def serve(run: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Run an order (a file) on this rank's core; beside it goes what the first rank found, or the error of any rank."""
    path = Path(sys.argv[1])
    _pin()
    try:
        found = run(json.loads(path.read_text()))
    except Exception:
        path.with_suffix(f".error{os.environ['RANK']}").write_text(traceback.format_exc())
        raise
    import torch.distributed as dist

    if dist.get_rank() == 0:
        path.with_suffix(".found").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    serve(_run)
