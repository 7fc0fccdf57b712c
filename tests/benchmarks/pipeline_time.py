"""Step times of our pipelines beside those of `torch.distributed.pipelining` with the same stages.

    python -m tests.benchmarks.pipeline_time [--links loopback delayed 1gbit] [--schedules 1F1B interleaved]
        [--micro-batches 4 8] [--rounds 12] [--markdown FILE] [--profiles FOLDER]

Two ranks of one thread, each pinned to a core, train a Llama; see `tests.benchmarks.pipeline_worker`. Both contenders
run in the same processes and take turns, in an order that changes with each round. Links: loopback; `delayed`, the
process group of `autoshard.testing.delayed_mesh`; a rate (`1gbit`), two emulated hosts, which takes root.

The ratio is ours over torch's. Of step times (of the slowest rank) it is the median of pairs. Of processor times it is
that of minima, ranks added, which other processes disturb least. The target is 1.0; the first losses must agree.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.pipeline_worker import (
    BANDWIDTH_BYTES_PER_S,
    LATENCY_S,
    LAYERS,
    OURS,
    SEQUENCES,
    TOKENS,
    TORCH,
    VOCABULARY,
)
from tests.benchmarks.step_rows import LOOPBACK
from tests.benchmarks.step_time import commit, date, run_order, versions
from tests.benchmarks.two_hosts import TwoHosts

DELAYED = "delayed"
SCHEDULES: Mapping[str, tuple[str, int]] = {"1F1B": ("1F1B", 1), "interleaved": ("Interleaved1F1B", 2)}
"""Our name of a schedule, and the stages of a rank."""
LOSS_TOLERANCE = 1e-4
_WORKER = ("-m", "tests.benchmarks.pipeline_worker")
_RANKS = 2


@dataclass(frozen=True, slots=True)
class Row:
    """Both contenders on one case; times of a step in seconds, processor times of both ranks together.

    `ratio` is the median of paired ratios of step times, with its quartiles; `cpu_ratio` is that of minima.
    """

    link: str
    schedule: str
    micro_batches: int
    step_s: tuple[float, float]
    cpu_s: tuple[float, float]
    ratio: float
    quartiles: tuple[float, float]
    loss_error: float

    @property
    def cpu_ratio(self) -> float:
        """Ours over torch's."""
        return self.cpu_s[0] / self.cpu_s[1]


def row_of(
    link: str,
    schedule: str,
    micro_batches: int,
    found: Mapping[str, Mapping[str, Any]],
    contenders: tuple[str, str] = (OURS, TORCH),
) -> Row:
    """The figures of a case, of what its ranks found."""
    ours, rival = (found[name] for name in contenders)
    ratios = [mine / theirs for mine, theirs in zip(ours["times_s"], rival["times_s"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    losses = zip(ours["losses"], rival["losses"], strict=True)
    return Row(
        *(link, schedule, micro_batches),
        step_s=(statistics.median(ours["times_s"]), statistics.median(rival["times_s"])),
        cpu_s=(_least(ours["cpu_s"]), _least(rival["cpu_s"])),
        ratio=middle,
        quartiles=(low, high),
        loss_error=max(abs(mine / theirs - 1) for mine, theirs in losses),
    )


def _least(of_rounds: Sequence[Sequence[float]]) -> float:
    """Each rank's minimum, added."""
    return sum(min(of_rank) for of_rank in zip(*of_rounds, strict=True))


def page(rows: Sequence[Row], command: str) -> str:
    """All cases, in Markdown."""
    lines = [
        "# Step time of pipelines beside torch.distributed.pipelining",
        "",
        f"`{command}`, {date()}, commit {commit()}, {versions()}, {_RANKS} Gloo ranks of one thread, each pinned to a "
        f"core. A Llama of {LAYERS} layers of 256 ({VOCABULARY} words) on {SEQUENCES} x {TOKENS} tokens, float32, "
        f"fused AdamW. `{DELAYED}`: links of {LATENCY_S * 1e3:g} ms and {BANDWIDTH_BYTES_PER_S * 8 / 1e9:g} Gbit/s.",
        "",
        "ms: median of the slowest rank, ours / torch's. ratio: median of paired ratios, its quartiles behind it. CPU "
        "ms: minimum of each rank, added: other processes disturb it least. Losses: the largest relative difference "
        "of the first three.",
        "",
        "| link | schedule | micro-batches | ms | ratio | CPU ms | CPU ratio | losses |",
        "|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *map(_line, rows)]) + "\n"


def _line(row: Row) -> str:
    cells = [
        *(row.link, row.schedule, str(row.micro_batches)),
        " / ".join(f"{seconds * 1e3:.0f}" for seconds in row.step_s),
        f"{row.ratio:.2f} ({row.quartiles[0]:.2f} to {row.quartiles[1]:.2f})",
        " / ".join(f"{seconds * 1e3:.0f}" for seconds in row.cpu_s),
        f"{row.cpu_ratio:.2f}",
        f"{row.loss_error:.0e}",
    ]
    return f"| {' | '.join(cells)} |"


def measure(link: str, schedule: str, micro_batches: int, rounds: int, profiles: str) -> Row:
    """Run a case."""
    name, virtual_stages = SCHEDULES[schedule]
    asked = {
        "schedule": name,
        "virtual_stages": virtual_stages,
        "micro_batches": micro_batches,
        "is_delayed": link == DELAYED,
        "rounds": rounds,
        "profiles": profiles,
    }
    with nullcontext() if link in (LOOPBACK, DELAYED) else TwoHosts(link) as hosts:
        return row_of(link, schedule, micro_batches, run_order(_WORKER, asked, _RANKS, hosts))


def main() -> int:
    """Measure, print; 1 if the losses of a case differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", nargs="+", default=[LOOPBACK, DELAYED], help="loopback, delayed, 1gbit, ...")
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--markdown", type=Path, help="write the page there too")
    parser.add_argument("--profiles", default="", metavar="FOLDER", help="write a profile of each rank there")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that emulated hosts are taken down
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # emulated hosts set theirs
    profiles = asked.profiles and str(Path(asked.profiles).resolve())
    rows = []
    for link in asked.links:
        for schedule in asked.schedules:
            for micro_batches in asked.micro_batches:
                rows.append(measure(link, schedule, micro_batches, asked.rounds, profiles))
                sys.stdout.write(_line(rows[-1]) + "\n")
                sys.stdout.flush()
    command = " ".join(["python -m tests.benchmarks.pipeline_time", *sys.argv[1:]])
    if asked.markdown is not None:
        asked.markdown.write_text(page(rows, command))
    return int(max(row.loss_error for row in rows) > LOSS_TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
