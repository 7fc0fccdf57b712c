"""Cost of the agreement of ranks in a step: `check="always"` and `"first"` beside `"off"`, on two Gloo ranks.

Run: python -m tests.benchmarks.agreement_cost [--rounds 100] [--write]

Each rank compiles a model, data parallel, and runs steps under each `check` in turns, the order reversed every second
round. It is one compiled step, whose `check` is set anew: steps that differ in their memory differ in time. Printed for
each case, as medians over rounds of differences to `"off"` in the same round:

* wall: seconds of a step on the slowest rank;
* CPU: seconds of the processor that a rank's process takes, its threads included, the mean of both ranks;
* own: seconds of the calling thread's processor time within the agreement's methods.

Wall and CPU of single steps scatter by more than the difference; "own" does not, and lacks only the kernel's work on
what is sent.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "tests" / "benchmarks" / "results" / "agreement_cost.md"
RANKS = 2
CHECKS = ("off", "first", "always")
CASES = {"about 200 ms": ("llama", 128, 8), "about 30 ms": ("llama", 8, 2)}
"""Model, tokens and batch, as in `step_cases`."""

_WARM_UP = 5
_METHODS = ("enter", "meet_for_guards", "post", "settle")


def main() -> int:
    """Start the ranks, or be one of them."""
    parser = argparse.ArgumentParser(description="Measure what the agreement of ranks costs a step.")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--write", action="store_true", help=f"put the page into {PAGE}")
    options = parser.parse_args()
    if "RANK" in os.environ:
        _run_rank(options.rounds, is_written=options.write)
        return 0
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.benchmarks.agreement_cost", *sys.argv[1:]]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(RANKS)
    ]
    return max(abs(rank.wait()) for rank in ranks)


def _run_rank(rounds: int, *, is_written: bool) -> None:
    import torch
    import torch.distributed as dist

    from tests.benchmarks.step_cases import Case

    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = [row for name, case in CASES.items() for row in _rows(name, _measure(Case(*case), rounds))]
    if dist.get_rank() == 0:
        page = _page(rows, rounds)
        Console(soft_wrap=True, highlight=False).print(page, markup=False)
        if is_written:
            PAGE.write_text(page, encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _measure(case: Any, rounds: int) -> dict[str, list[tuple[float, float, float]]]:
    """Wall, CPU and own seconds of each round, by check."""
    from autoshard.runtime.agreement.step_agreement import Check
    from tests.benchmarks.step_cases import make_batches

    batches = make_batches(case, 4)
    step, agreement, own = _make_step(case)
    for index in range(_WARM_UP):
        step(batches[index % 4])
    found: dict[str, list[tuple[float, float, float]]] = {check: [] for check in CHECKS}
    for index in range(rounds):
        for check in CHECKS if index % 2 else CHECKS[::-1]:
            agreement._check = Check(check)
            found[check].append(_time(step, own, batches[index % 4]))
    return found


def _make_step(case: Any) -> tuple[Callable[[Any], Any], Any, list[float]]:
    """A step, its agreement, and the list to which each method of that adds the seconds that it took."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    import autoshard
    from autoshard import P
    from tests.benchmarks.step_cases import make_model

    model = make_model(case)
    specs = {"input:*": P("data"), **{name: P() for name, _ in model.named_parameters()}}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("data",))
    step = autoshard.compile(model, mesh, optimizer=optimizer, constraints=specs)
    own: list[float] = []
    for name in _METHODS:
        _watch(step.sharded.agreement, name, own)
    return lambda batch: step(**batch), step.sharded.agreement, own


def _watch(agreement: Any, name: str, own: list[float]) -> None:
    method = getattr(agreement, name)

    def timed(*arguments: Any, **options: Any) -> Any:
        start = time.thread_time()
        try:
            return method(*arguments, **options)
        finally:
            own.append(time.thread_time() - start)

    setattr(agreement, name, timed)


def _time(step: Callable[[Any], Any], own: list[float], batch: Any) -> tuple[float, float, float]:
    """Wall seconds of the slowest rank; CPU seconds and those of the agreement's own, means of the ranks."""
    import torch
    import torch.distributed as dist

    own.clear()
    dist.barrier()
    start, worked = time.perf_counter(), time.process_time()
    step(batch)
    worked, start = time.process_time() - worked, time.perf_counter() - start
    slowest = torch.tensor([start], dtype=torch.float64)
    sums = torch.tensor([worked, sum(own)], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.all_reduce(sums)
    cpu, mine = (sums / RANKS).tolist()
    return slowest.item(), cpu, mine


def _page(rows: Sequence[str], rounds: int) -> str:
    import torch

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return "\n".join((
        "# What the agreement of ranks costs a step",
        "",
        f"`python -m tests.benchmarks.agreement_cost --rounds {rounds}`, {datetime.now(UTC):%Y-%m-%d}, at commit "
        f"{commit.stdout.strip()}, torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}.",
        "",
        'Two Gloo ranks, a core and a thread each. Medians of differences to `check="off"` in the same round; "own" is '
        "the processor time of the agreement's methods.",
        "",
        "| step | wall, CPU with `\"off\"` | check | wall | CPU | own |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
    ))  # fmt: skip


def _rows(name: str, found: dict[str, list[tuple[float, float, float]]]) -> list[str]:
    wall, cpu, _ = (statistics.median(column) for column in zip(*found["off"], strict=True))
    rows = []
    for check in CHECKS[1:]:
        more = [_difference(found, check, column) for column in range(2)]
        own = statistics.median(row[2] for row in found[check])
        rows.append(
            f"| {name} | {wall * 1e3:.2f}, {cpu * 1e3:.2f} ms | `{check}` | {more[0] * 1e3:+.3f} ms "
            f"({more[0] / wall:+.2%}) | {more[1] * 1e3:+.3f} ms ({more[1] / cpu:+.2%}) | {own * 1e3:.3f} ms "
            f"({own / wall:.2%}) |"
        )
    return rows


def _difference(found: dict[str, Sequence[tuple[float, float, float]]], check: str, column: int) -> float:
    pairs = zip(found[check], found["off"], strict=True)
    return statistics.median(one[column] - other[column] for one, other in pairs)


if __name__ == "__main__":
    sys.exit(main())
