"""`autoshard calibrate`: start the ranks, measure, and show the results."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import distributed
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from autoshard.calibration import calibrate
from autoshard.errors import AutoshardError, MeshError, NotAvailableError
from autoshard.runtime.launch import world_size
from cost_models.calibration import Calibration


def measure_machine(ranks: int | None, budget_s: float) -> Calibration | None:
    """Measure this machine with the ranks of this `torchrun`, or with `ranks` local processes started here.

    Returns:
        The calibration; on all ranks of a `torchrun` except the first, None.

    Raises:
        NotAvailableError: `budget_s` is not a finite number of seconds above 0.
        MeshError: `ranks` is below one, or differs from the size of this process's run.
        AutoshardError: a started process failed.
    """
    if not 0 < budget_s < math.inf:
        raise NotAvailableError(f"--budget-s {budget_s:g} must be a number of seconds above 0.")
    running = world_size()
    if ranks is not None and (ranks < 1 or running not in (1, ranks)):
        raise MeshError(f"--ranks {ranks} must be at least 1, and in a run of {running} processes {running}.")
    if running > 1:
        return _measure(budget_s)
    count = ranks or torch.cuda.device_count() or 2
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    keep_freed_memory()
    config = LaunchConfig(1, 1, count, run_id="calibrate", rdzv_backend="c10d", rdzv_endpoint="localhost:0")
    try:
        found: Calibration = elastic_launch(config, _measure)(budget_s)[0]
    except ChildFailedError as error:
        raise AutoshardError(f"calibration failed on a rank: {error.get_first_failure()[1].message}") from error
    return found


KEEPING = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_TOP_PAD_": str(2**26)}


def keep_freed_memory() -> None:
    """Make processes started from here on keep freed host memory, if the C library is glibc.

    Sets environment variables of glibc that are not set yet. Without them, each step returns its activations to the
    system, which maps and zeroes the pages anew. On a CPU this takes as long as reading the pages. PyTorch's tuning
    guide advises a caching allocator for the same reason.
    """
    for name, value in KEEPING.items():
        os.environ.setdefault(name, value)


def _measure(budget_s: float) -> Calibration | None:
    """Make a process group, and measure with all its ranks; only rank 0 returns the calibration."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    is_first = distributed.get_rank() == 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not is_first) as progress:
        task = progress.add_task("starting")

        def show(what: str, done: int, total: int) -> None:
            progress.update(task, description=what, completed=done, total=total)

        found = calibrate(budget_s=budget_s, on_progress=show)
        progress.update(task, description="done", completed=progress.tasks[task].total)
    distributed.destroy_process_group()
    return found if is_first else None


def calibration_table(found: Calibration, path: Path) -> Table:
    """Return a table of measured times and their ratios predicted / measured; its title names the written file."""
    title = f"{found.cluster.size} ranks of this machine, written to {path}"
    table = Table("measurement", "measured", "predicted / measured", title=title)
    for name, seconds in found.measured_s.items():
        ratio = found.ratios.get(name)
        table.add_row(name, f"{seconds * 1e6:,.1f} us", "" if ratio is None else f"{ratio:.2f}")
    return table


def calibration_json(found: Calibration) -> dict[str, Any]:
    """Return JSON data: "date", "measured_s" (seconds by measurement) and "predicted_over_measured" (ratios)."""
    return {"date": found.date, "measured_s": dict(found.measured_s), "predicted_over_measured": found.ratios}
