"""Step times of our plans beside the same step written by hand in PyTorch.

    python -m tests.benchmarks.step_time                  every case on loopback, hours; each case is saved as it ends
    python -m tests.benchmarks.step_time --link 1gbit     on two emulated hosts (root)
    python -m tests.benchmarks.step_time --models llama --tokens 128 --contenders data sharded --rounds 8
    python -m tests.benchmarks.step_time --report         the table of what is saved

1. Each comparison of a case is a run of `torchrun` of its own: two ranks of one thread, each pinned to a core (one rank
   for a mesh of one).
2. Rivals are tuned first (DDP's bucket size, FSDP2's prefetching, DTensor's loss), then all take turns, round after
   round, in an order that changes with each round. A step's time is the slowest rank's; of the rounds, the median
   counts, and the median of paired ratios. The first losses of all must agree.
3. Bytes and peak memory are counted as `tests.benchmarks.step_worker` says.
4. Rows are merged into results/step_time.json, the table into results/step_time.md. A failure is a row with its error.

Targets, ours over the rival: DDP 1.0, FSDP2 0.95 and with our reduce-scatter 1.0, DTensor 0.75, the best of the three
0.95 for the planner's free choice, eager and `torch.compile` 1.0; peak memory at most the rival's.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.markdown import Markdown

from tests.benchmarks.step_cases import CASES, COMPARISONS, Case, Comparison, as_json
from tests.benchmarks.step_rows import LOOPBACK, TABLE, Row, expected, fill, save
from tests.benchmarks.step_worker import MEMORY_ENVIRONMENT
from tests.benchmarks.two_hosts import TwoHosts

ROUNDS = 20
_WORKER = ("-m", "tests.benchmarks.step_worker")


class WorkerError(Exception):
    """A run that ended with an error; the message is its last line."""


@dataclass(frozen=True, slots=True)
class _Options:
    rounds: int
    measures_memory: bool
    profiles: str
    hosts: TwoHosts | None


def measure(case: Case, comparison: Comparison, empty: Sequence[Row], options: _Options) -> list[Row]:
    """The rows of one comparison of a case, filled."""
    load = os.getloadavg()[0]
    try:
        found = _run(case, comparison, comparison.contenders, options)
        peaks = {name: _peak_of(case, comparison, name, options) for name in _weighed(comparison, options)}
        figures = [fill(row, comparison, found, peaks) for row in empty]
    except WorkerError as error:
        figures = [{"error": str(error)} for _ in empty]
    source = {"versions": versions(), "commit": commit(), "date": date(), "load": load}
    return [replace(row, **found, **source) for row, found in zip(empty, figures, strict=True)]


def _weighed(comparison: Comparison, options: _Options) -> Iterable[str]:
    return comparison.contenders if options.measures_memory else ()


def _peak_of(case: Case, comparison: Comparison, name: str, options: _Options) -> int:
    found = _run(case, comparison, [name], options, memory=True)
    return found[name]["peak_bytes"]


def _run(
    case: Case, comparison: Comparison, contenders: Sequence[str], options: _Options, memory: bool = False
) -> dict[str, Any]:
    """Return the ranks' measures of some contenders; `WorkerError` if one failed."""
    asked = {"case": as_json(case), "contenders": list(contenders), "rounds": options.rounds, "memory": memory}
    return run_order(_WORKER, {**asked, "profiles": options.profiles}, comparison.ranks, options.hosts, memory=memory)


def run_order(
    worker: Sequence[str], asked: Mapping[str, Any], ranks: int, hosts: TwoHosts | None, *, memory: bool = False
) -> dict[str, Any]:
    """The findings of a worker's first rank; `WorkerError` where a rank failed.

    Args:
        worker: arguments of Python; the worker serves orders by `tests.benchmarks.step_worker.serve`.
        asked: the order, as plain data.
        ranks: how many processes.
        hosts: where they run; None: here.
        memory: whether large allocations are to be counted.
    """
    with tempfile.TemporaryDirectory() as folder:
        order = Path(folder) / "order.json"
        order.write_text(json.dumps(asked))
        _launch([*worker, str(order)], ranks, hosts, memory)
        found = order.with_suffix(".found")
        if found.exists():
            return json.loads(found.read_text())
        errors = [path.read_text().strip().splitlines()[-1] for path in sorted(Path(folder).glob("order.error*"))]
        raise WorkerError(errors[0][:300] if errors else "the ranks ended without a word")


def _launch(arguments: Sequence[str], ranks: int, hosts: TwoHosts | None, memory: bool) -> None:
    environment = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TRANSFORMERS_VERBOSITY": "error"}
    os.environ.update(environment | (MEMORY_ENVIRONMENT if memory else {}))
    try:
        if hosts is not None and ranks > 1:
            hosts.torchrun(sys.executable, arguments)
            return
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        subprocess.run([*launcher, *arguments], check=False)
    finally:
        for name in MEMORY_ENVIRONMENT:
            os.environ.pop(name, None)


def versions() -> str:
    """Versions of what runs."""
    return f"torch {torch.__version__}, transformers {transformers.__version__}, Python {sys.version.split()[0]}"


def commit() -> str:
    """The checkout's, or "unknown"."""
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], check=False, capture_output=True, text=True)
    return asked.stdout.strip() or "unknown"


def date() -> str:
    """Now, in UTC."""
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = list(dict.fromkeys(case.model for case in CASES))
    parser.add_argument("--models", nargs="+", default=models, choices=models)
    parser.add_argument("--tokens", type=int, nargs="+", help="128, 1024; of an image its class token is one more")
    parser.add_argument("--contenders", nargs="+", default=list(COMPARISONS), choices=list(COMPARISONS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--link", metavar="RATE", help="two emulated hosts, joined at 1gbit, 200mbit, ...; needs root")
    parser.add_argument("--no-memory", action="store_true", help="leave peak memory out: half the runs")
    parser.add_argument("--no-save", action="store_true", help="print the rows, and leave the results as they are")
    parser.add_argument("--profiles", default="", metavar="FOLDER", help="write a profile of each contender there")
    parser.add_argument("--report", action="store_true", help="measure nothing; show what is saved")
    return parser.parse_args()


def main() -> None:
    """Measure case by case, save and print."""
    asked, console = _parse(), Console(width=200)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that emulated hosts are taken down
    if asked.report:
        console.print(Markdown(TABLE.read_text()))
        return
    cases = [case for case in CASES if case.model in asked.models and (not asked.tokens or case.tokens in asked.tokens)]
    with TwoHosts(asked.link) if asked.link else nullcontext() as hosts:
        profiles = asked.profiles and str(Path(asked.profiles).resolve())
        options = _Options(asked.rounds, not asked.no_memory, profiles, hosts)
        for case in cases:
            for name in asked.contenders:
                empty = expected([case], [name], asked.link or LOOPBACK)
                rows = measure(case, COMPARISONS[name], empty, options) if empty else []
                for row in rows:
                    console.print(row)
                if not asked.no_save:
                    save(rows)


if __name__ == "__main__":
    main()
