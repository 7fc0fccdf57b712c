"""Predicted and measured step time and peak memory of plans on this machine's cores over Gloo.

Run::

    python -m tests.benchmarks.local_plans            both models on 2 and on 4 ranks, about half an hour
    python -m tests.benchmarks.local_plans --ranks 4 --models gpt --part 1/2 --save
                                                      a part of it; --save merges its rows into results/local_plans.json
    python -m tests.benchmarks.local_plans --report   all rows that are saved, and the figures over them

1. The ranks measure the machine together (`cost_models.calibration`) at each start.
2. The layouts of `tests.benchmarks.local_layouts` are searched on the measurement, and compiled.
3. All plans run in turns, so that other work on the machine slows all plans equally. A step is forward and backward.
   Its time is the slowest rank's, in the median of the rounds. The time of other processes is written beside.
4. A shared machine changes its speed by the minute: products ran at 95, 107 and 129 GFLOP/s in three calibrations. The
   machine is measured after each block of rounds, and plans are priced for the mean.

Targets of times: rank correlation at least 0.9, mean absolute error at most 15 %, and the fastest plan among the
predicted three fastest. The predicted peak memory is within 5 % of the measured peak (`tests.benchmarks.live_memory`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import autoshard
from autoshard import tracing
from autoshard.calibration import calibrate, semantic_samples
from autoshard.cli.calibrate import keep_freed_memory
from autoshard.ir.plan import Plan
from cost_models.calibration import pooled
from passes.memory.lowered_memory import peak_bytes
from tests.benchmarks.live_memory import peak_bytes_of
from tests.benchmarks.local_layouts import MODELS, ChosenLayout, Layout, choose_layout, layouts

BLOCKS, ROUNDS = 2, 3
"""Rounds run in blocks; the machine is measured before the first block and after each block."""
RESULTS = Path(__file__).parent / "results" / "local_plans.json"


@dataclass(frozen=True, slots=True)
class Row:
    """One plan: predicted and measured seconds per step and bytes per rank.

    `predicted_bytes` is the planner's peak, `lowered_bytes` that of the lowered program (0: not counted); `others` is
    the share of the machine that other processes had.
    """

    model: str
    ranks: int
    mesh: str
    layout: str
    predicted_s: float
    measured_s: float
    predicted_bytes: int
    measured_bytes: int
    others: float
    lowered_bytes: int = 0


@dataclass(slots=True)
class _Run:
    """A compiled plan and the times of its steps."""

    row: dict[str, Any]
    step: Callable[[], None]
    held: list[torch.Tensor]
    times_s: list[float]


def measure(model: str, part: tuple[int, int], budget_s: float) -> list[dict[str, Any]]:
    """Return the rows of the plans of a part (index, count), equal on every rank; every rank calls this function."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    passes = [calibrate(budget_s=budget_s)]
    index, parts = part
    wanted = layouts(model, dist.get_world_size())[index - 1 :: parts]
    cluster = autoshard.Cluster(passes[0].cluster.node)
    chosen = _chosen(model, wanted, cluster) if dist.get_rank() == 0 else []
    plans: list[tuple[Layout, Plan]] = _shared([(layout, found.plan(cluster)) for layout, found in chosen])
    runs = [_compile(model, layout, plan, cluster) for layout, plan in plans]
    for run in runs:
        run.step()
        run.row["measured_bytes"] = _maximum(peak_bytes_of(run.step, run.held))
    others: list[float] = []
    for _ in range(BLOCKS):
        before = _busy_s()
        for _ in range(ROUNDS):
            for run in runs:
                run.step()
                run.times_s.append(_time_of(run.step))
        others.append(_others_share(before, _busy_s()))
        passes.append(calibrate(budget_s=budget_s))
    cluster = autoshard.Cluster(pooled(passes, kernels=tuple(semantic_samples())).cluster.node)
    predicted = _shared([found.plan(cluster).predicted for _, found in chosen])
    rows = [
        {
            **run.row,
            "predicted_s": of_plan.step_time_s,
            "predicted_bytes": of_plan.peak_memory_bytes,
            "measured_s": statistics.median(run.times_s),
            "others": statistics.mean(others),
        }
        for run, of_plan in zip(runs, predicted, strict=True)
    ]
    dist.destroy_process_group()
    return rows


def _shared(of_first: Any) -> Any:
    """The object that the first rank has, on every rank."""
    said = [of_first]
    dist.broadcast_object_list(said)
    return said[0]


def _chosen(name: str, wanted: Sequence[Layout], cluster: autoshard.Cluster) -> list[tuple[Layout, ChosenLayout]]:
    """A plan for each layout, without repetitions of a plan."""
    model, inputs = MODELS[name]()
    program = tracing.trace(model, (), inputs, grad=True)
    found: dict[tuple[str, tuple[int, ...]], tuple[Layout, ChosenLayout]] = {}
    for layout in wanted:
        chosen = choose_layout(program, layout, cluster)
        found.setdefault((str(layout.mesh), chosen.choice), (layout, chosen))
    return list(found.values())


def _compile(name: str, layout: Layout, plan: Plan, cluster: autoshard.Cluster) -> _Run:
    model, inputs = MODELS[name]()
    sharded = autoshard.compile(model, cluster, example_inputs=inputs, plan=plan, verify=False)
    assert isinstance(sharded, autoshard.ShardedModule)
    assert sharded.program is not None

    def step() -> None:
        sharded.zero_grad(set_to_none=True)
        outputs = sharded(**inputs)  # held to the end, as callers do
        outputs["loss"].backward()

    row = {
        "model": name,
        "ranks": dist.get_world_size(),
        "mesh": "x".join(str(size) for _, size in layout.mesh.axes),
        "layout": layout.name,
        "lowered_bytes": peak_bytes(sharded.program.phased),
    }
    held = [*sharded.parameters(), *sharded.buffers(), *inputs.values()]
    return _Run(row, step, held, [])


def _time_of(step: Callable[[], None]) -> float:
    """Seconds of one step on the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    step()
    return _maximum(time.perf_counter() - start)


def _maximum(value: float) -> Any:
    """The largest value over the ranks, as a number of the type of `value`."""
    found = torch.tensor(value)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def _busy_s() -> tuple[float, float, float]:
    """Return the clock, the worked seconds of the machine's cores, and the worked seconds of all ranks."""
    ours = torch.tensor(time.process_time(), dtype=torch.float64)
    dist.all_reduce(ours)
    user, nice, system, _, _, interrupts, soft, *_ = (
        int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    )
    busy = (user + nice + system + interrupts + soft) / os.sysconf("SC_CLK_TCK")
    return time.perf_counter(), busy, ours.item()


def _others_share(before: tuple[float, float, float], after: tuple[float, float, float]) -> float:
    """The share of the machine's cores that other processes used between two times."""
    clock, busy, ours = (late - early for early, late in zip(before, after, strict=True))
    return max(0.0, busy - ours) / clock / (os.cpu_count() or 1)


def run_on(ranks: int, model: str, part: tuple[int, int] = (1, 1), budget_s: float = 15.0) -> list[Row]:
    """The rows of the plans of a part, measured on so many local processes."""
    os.environ["OMP_NUM_THREADS"] = "1"
    keep_freed_memory()
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=ranks, rdzv_backend="c10d", rdzv_endpoint="localhost:0"
    )
    found = elastic_launch(config, measure)(model, part, budget_s)
    return [Row(**row) for row in found[0]]


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """Rank correlation and errors over `rows`, and the rank that the prediction gives to the plan
    measured as fastest."""
    predicted, measured = [row.predicted_s for row in rows], [row.measured_s for row in rows]
    best = min(range(len(rows)), key=measured.__getitem__)
    lowered = [abs(row.lowered_bytes / row.measured_bytes - 1) for row in rows if row.lowered_bytes]
    return {
        "plans": len(rows),
        "slowest over fastest": max(measured) / min(measured),
        "spearman": float(np.corrcoef(_ranks(predicted), _ranks(measured))[0, 1]) if len(rows) > 1 else 1.0,
        "mape": statistics.mean(abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)),
        "bias": statistics.mean(p / m - 1 for p, m in zip(predicted, measured, strict=True)),
        "rank of the fastest": 1 + sum(value < predicted[best] for value in predicted),
        "worst error of memory": max(abs(row.predicted_bytes / row.measured_bytes - 1) for row in rows),
    } | ({"worst error of lowered memory": max(lowered)} if lowered else {})


def summaries(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Return the `summary` of each model and number of ranks, of each number of ranks, and of all rows."""
    groups = {f"{row.model} on {row.ranks} ranks": (row.model, row.ranks) for row in rows}
    found = {
        name: summary([row for row in rows if (row.model, row.ranks) == key]) for name, key in sorted(groups.items())
    }
    for ranks in sorted({row.ranks for row in rows}):
        found[f"all on {ranks} ranks"] = summary([row for row in rows if row.ranks == ranks])
    return found | {"all": summary(rows)}


def _ranks(values: Sequence[float]) -> np.ndarray:
    return np.argsort(np.argsort(values))


def table_of(rows: Iterable[Row]) -> Table:
    """A table of all plans with predicted and measured time and memory."""
    table = Table(
        "model", "mesh", "layout", "predicted", "measured", "ratio", "memory", "measured", "ratio", "lowered", "others"
    )
    for row in rows:
        table.add_row(
            row.model, row.mesh, row.layout, f"{row.predicted_s * 1e3:.1f} ms", f"{row.measured_s * 1e3:.1f} ms",
            f"{row.predicted_s / row.measured_s:.2f}", f"{row.predicted_bytes / 2**20:.2f} MiB",
            f"{row.measured_bytes / 2**20:.2f} MiB", f"{row.predicted_bytes / row.measured_bytes:.3f}",
            f"{row.lowered_bytes / row.measured_bytes:.3f}" if row.lowered_bytes else "",
            f"{row.others:.0%}",
        )  # fmt: skip
    return table


def main() -> None:
    """Measure, print, and save on request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--part", default="1/1", help="which of how many parts of each list of plans")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--report", action="store_true", help="measure nothing; show what is saved")
    options = parser.parse_args()
    console = Console(width=170)
    index, parts = (int(number) for number in options.part.split("/"))
    rows: list[Row] = []
    if options.report:
        rows = _saved()
    else:
        for ranks in options.ranks:
            for model in options.models:
                measured = run_on(ranks, model, (index, parts))
                if options.save:  # at once: what follows takes minutes
                    _save(measured)
                rows += measured
    console.print(table_of(rows))
    for name, figures in summaries(rows).items():
        console.print(name, {key: round(value, 3) for key, value in figures.items()})


def _saved() -> list[Row]:
    return [Row(**row) for row in json.loads(RESULTS.read_text())["rows"]] if RESULTS.exists() else []


def _save(rows: Sequence[Row]) -> None:
    """Merge rows into the file; a new row replaces the row of the same plan."""
    merged = {(row.model, row.ranks, row.mesh, row.layout): row for row in (*_saved(), *rows)}
    kept = sorted(merged.values(), key=lambda row: (row.model, row.ranks))
    document = {
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "rows": [asdict(row) for row in kept],
        "summary": summaries(kept),
    }
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
