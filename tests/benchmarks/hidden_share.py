"""Share of a step's communication that is hidden: four plans of a Llama on two Gloo processes on a slow link.

    python -m tests.benchmarks.hidden_share [--steps 3]

Each plan is measured twice. The first clock counts the products of a process, exactly under any load, and the link
takes 0.4 of the products' time. The second clock is the machine's, with a link of 1 ms and 100 MB/s (medians over
steps). The hideable part is the time of products of the same phase, in any order
(`tests.end_to_end.work_clock.hideable_s`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist
from rich.console import Console

from autoshard.testing import Link, delayed_mesh, record_transfers
from tests.benchmarks.hidden_cases import AXIS, PLANS, batch, compiled
from tests.end_to_end.test_hidden import SIZES, measured, model, programs_of, rig_of
from tests.end_to_end.work_clock import hideable_s, share_hidden, walk
from tests.runtime.processes import run_checks

LINK = Link(1e-3, 1e8)


def _counted(name: str) -> dict[str, float]:
    """Measure by the clock of products."""
    simulated = compiled(name, model())
    simulated(**batch(*SIZES[name]))
    _, plain = programs_of(simulated)
    rig = rig_of(plain)
    found = measured(name, rig)
    total = sum(item.duration_s for item in walk(plain, rig))
    return {
        "sends": len(found),
        "sends without overlap": len(walk(plain, rig)),
        "could be hidden": hideable_s(plain, rig) / total,
        "hidden of it": share_hidden(plain, found, rig),
        "exposed": sum(item.waited_s for item in found) / total,
    }


def _timed(name: str, steps: int) -> dict[str, float]:
    """Measure by the machine's clock."""
    mesh = delayed_mesh({AXIS: 2}, {AXIS: LINK})
    step = compiled(name, model(), mesh)
    step(**batch(*SIZES[name]))
    rows = []
    for seed in range(steps):
        dist.barrier()
        start = time.perf_counter()
        with record_transfers(mesh) as transfers:
            step(**batch(*SIZES[name], seed=seed))
        took = time.perf_counter() - start
        rows.append((took, sum(item.duration_s for item in transfers), sum(item.waited_s for item in transfers)))
    took, sent, exposed = (statistics.median(column) for column in zip(*rows, strict=True))
    return {"step, s": took, "sending, s": sent, "exposed, s": exposed}


def _row(name: str, steps: int, folder: str) -> None:
    found: dict[str, Any] = {**_counted(name), **_timed(name, steps)}
    if dist.get_rank() == 0:
        Path(folder, f"{name}.json").write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    steps = parser.parse_args().steps
    console = Console(width=200)
    for name in PLANS:
        with TemporaryDirectory() as folder:
            wrong = run_checks({name: partial(_row, name, steps, folder)}, ranks=2, deadline_s=600.0)[name]
            row = json.loads(Path(folder, f"{name}.json").read_text()) if not wrong else {}
        cells = [f"{value:.3g}" for value in row.values()] or [wrong]
        console.print(f"| {' | '.join([name, *cells])} |")


if __name__ == "__main__":
    main()
