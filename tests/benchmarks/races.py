"""Races of training steps on ranks of this machine: start, turns and reports.

A benchmark writes an *order*, plain data. `torchrun` starts each rank on its own core and thread, each rank serves the
order, and the first rank's findings come back. Contenders take turns, in an order that changes with each round. A
step's time is the slowest rank's. The first losses of all contenders must agree.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from tests.benchmarks.two_hosts import TwoHosts

LOOPBACK = "loopback"
MEMORY_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_MMAP_MAX_": "1000000", "MALLOC_TRIM_THRESHOLD_": "0"}
"""Settings that map every large allocation separately, so that it is counted, and returned when freed."""
_WARM_UP, _LOSSES = 3, 3


class WorkerError(Exception):
    """A run ended with an error. The message is the last line of the run's error."""


def run_order(
    worker: str, order: Mapping[str, Any], ranks: int, hosts: TwoHosts | None = None, *, memory: bool = False
) -> dict[str, Any]:
    """Return the findings of a worker's first rank; raise `WorkerError` if a rank failed.

    Args:
        worker: name of a module of `tests.benchmarks` that calls `serve`.
        order: plain data.
        ranks: number of processes.
        hosts: hosts of the processes; None: this machine.
        memory: whether large allocations are counted.
    """
    environment = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TRANSFORMERS_VERBOSITY": "error"}
    environment |= MEMORY_ENVIRONMENT if memory else {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "order.json"
        path.write_text(json.dumps(order))
        arguments = ["-m", f"tests.benchmarks.{worker}", str(path)]
        if hosts is not None and ranks > 1:
            hosts.torchrun(sys.executable, arguments, environment)
        else:
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            subprocess.run([*launcher, *arguments], check=False, env=os.environ | environment)
        found = path.with_suffix(".found")
        if found.exists():
            return json.loads(found.read_text())
        errors = [item.read_text().strip().splitlines()[-1] for item in sorted(Path(folder).glob("order.error*"))]
        raise WorkerError(errors[0][:300] if errors else "the ranks ended without a word")


def serve(run: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Run an order (a file) on this rank's core, and write the first rank's findings or any error beside the file."""
    path, rank = Path(sys.argv[1]), os.environ["RANK"]
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(rank) % len(cores)]})  # before torch makes threads
    import torch
    import torch.distributed as dist

    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        found = run(json.loads(path.read_text()))
    except Exception:
        path.with_suffix(f".error{rank}").write_text(traceback.format_exc())
        raise
    if dist.get_rank() == 0:
        path.with_suffix(".found").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def take_turns(
    steps: Mapping[str, Callable[[Any], Any]], batches: Sequence[Any], rounds: int, loss_of: Callable[[Any], float]
) -> dict[str, Any]:
    """Times, processor times of each rank, and first losses of contenders that run in turns."""
    found: dict[str, Any] = {name: {"times_s": [], "cpu_s": []} for name in steps}
    for name, step in steps.items():
        found[name]["losses"] = [loss_of(step(batch)) for batch in islice(cycle(batches), _LOSSES)]
        for batch in islice(cycle(batches), _WARM_UP):
            step(batch)
    for index, batch in enumerate(islice(cycle(batches), rounds)):
        for name in list(steps) if index % 2 else list(steps)[::-1]:
            seconds, worked = times_of(steps[name], batch)
            found[name]["times_s"].append(seconds)
            found[name]["cpu_s"].append(worked)
    return found


def times_of(step: Callable[[Any], Any], batch: Any) -> tuple[float, list[float]]:
    """Return the seconds of a step on the slowest rank, and each rank's processor seconds."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    start, worked = time.perf_counter(), time.process_time()
    step(batch)
    mine = torch.tensor([time.perf_counter() - start, time.process_time() - worked], dtype=torch.float64)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return max(item[0].item() for item in every), [item[1].item() for item in every]


def paired_quartiles(mine_s: Sequence[float], theirs_s: Sequence[float]) -> list[float]:
    """Return the three quartiles of the ratios of paired times; the second one is the median."""
    return statistics.quantiles([mine / theirs for mine, theirs in zip(mine_s, theirs_s, strict=True)], n=4)


def mesh_along(axis: str) -> Any:
    """A device mesh of all ranks along one axis."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(axis,))


def parser_of(description: str | None, rounds: int) -> argparse.ArgumentParser:
    """A parser with this description and an option for the number of rounds."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds)
    return parser


def versions() -> str:
    """Return the versions of the running software."""
    import torch
    import transformers

    return f"torch {torch.__version__}, transformers {transformers.__version__}, Python {sys.version.split()[0]}"


def commit() -> str:
    """The short commit of the checkout, or "unknown"."""
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], check=False, capture_output=True, text=True)
    return asked.stdout.strip() or "unknown"


def date() -> str:
    """The present date and time in UTC."""
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
