"""Step times of our pipelines beside `torch.distributed.pipelining` with the same stages.

    python -m tests.benchmarks.pipeline_time [--links loopback delayed 1gbit] [--schedules 1F1B interleaved]
        [--micro-batches 4 8] [--rounds 12] [--markdown FILE]

Two ranks of one thread, each pinned to a core, train a Llama; see `tests.benchmarks.pipeline_worker`. Both contenders
run in the same processes and take turns, in an order that changes with each round. Links are loopback, `delayed` (the
process group of `autoshard.testing.delayed_mesh`), or a rate such as `1gbit` (two emulated hosts, as root).

The ratio is ours over torch's. For step times (the slowest rank's) the ratio is the median of pairs. For processor
times it is the ratio of minima summed over ranks, which other processes disturb least. The target is 1.0, and the first
losses must agree.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from tests.benchmarks.pipeline_worker import LAYERS, OURS, SEQUENCES, TOKENS, TORCH, VOCABULARY
from tests.benchmarks.races import (
    BANDWIDTH_BYTES_PER_S,
    DELAYED,
    LATENCY_S,
    LOOPBACK,
    commit,
    date,
    paired_quartiles,
    parser_of,
    run_order,
    versions,
)
from tests.benchmarks.two_hosts import TwoHosts

SCHEDULES: Mapping[str, tuple[str, int]] = {"1F1B": ("1F1B", 1), "interleaved": ("Interleaved1F1B", 2)}
"""Our name of a schedule, and the stages of a rank."""
LOSS_TOLERANCE = 1e-4
RANKS = 2


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

    def cells(self, digits: int) -> list[str]:
        """Milliseconds with so many digits, ratios and losses, in Markdown."""
        return [
            " / ".join(f"{seconds * 1e3:.{digits}f}" for seconds in self.step_s),
            f"{self.ratio:.2f} ({self.quartiles[0]:.2f} to {self.quartiles[1]:.2f})",
            " / ".join(f"{seconds * 1e3:.{digits}f}" for seconds in self.cpu_s),
            f"{self.cpu_ratio:.2f}",
            f"{self.loss_error:.0e}",
        ]


def row_of(
    link: str,
    schedule: str,
    micro_batches: int,
    found: Mapping[str, Mapping[str, Any]],
    contenders: tuple[str, str] = (OURS, TORCH),
) -> Row:
    """Return the figures of a case from its ranks' findings."""
    ours, rival = (found[name] for name in contenders)
    low, middle, high = paired_quartiles(ours["times_s"], rival["times_s"])
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


SETTING = f"{RANKS} Gloo ranks of one thread, each pinned to a core"
LINKS = f"`{DELAYED}`: links of {LATENCY_S * 1e3:g} ms and {BANDWIDTH_BYTES_PER_S * 8 / 1e9:g} Gbit/s."


def run_on(link: str, worker: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the findings of a worker's ranks on a link."""
    with nullcontext() if link in (LOOPBACK, DELAYED) else TwoHosts(link) as hosts:
        return run_order(worker, {**asked, "is_delayed": link == DELAYED}, RANKS, hosts)


def line_of(cells: Iterable[str]) -> str:
    """A line of a table in Markdown."""
    return f"| {' | '.join(cells)} |"


def options_on_links(description: str | None, rounds: int) -> argparse.ArgumentParser:
    """The options that benchmarks on links have in common."""
    parser = parser_of(description, rounds)
    parser.add_argument("--links", nargs="+", default=[LOOPBACK, DELAYED], help="loopback, delayed, 1gbit, ...")
    parser.add_argument("--markdown", type=Path, help="write the page there too")
    return parser


def report(
    rows: Iterable[Row], line: Callable[[Row], str], head: Callable[[str], Sequence[str]], name: str, page: Path | None
) -> int:
    """Measure and print rows, and write the page on request; return 1 if the losses of a case differ.

    Args:
        rows: yields rows, each measured when it is drawn.
        line: formats a row.
        head: the page in front of its rows, from the command.
        name: name of the benchmark.
        page: path of the page.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that emulated hosts are taken down
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # emulated hosts set theirs
    measured = []
    for row in rows:
        measured.append(row)
        sys.stdout.write(line(row) + "\n")
        sys.stdout.flush()
    if page is not None:
        command = " ".join([f"python -m tests.benchmarks.{name}", *sys.argv[1:]])
        page.write_text("\n".join([*head(command), *map(line, measured)]) + "\n")
    return int(max(row.loss_error for row in measured) > LOSS_TOLERANCE)


def _head(command: str) -> list[str]:
    return [
        "# Step time of pipelines beside torch.distributed.pipelining",
        "",
        f"`{command}`, {date()}, commit {commit()}, {versions()}, {SETTING}. A Llama of {LAYERS} layers of 256 "
        f"({VOCABULARY} words) on {SEQUENCES} x {TOKENS} tokens, float32, fused AdamW. {LINKS}",
        "",
        "ms: median of the slowest rank, ours / torch's. ratio: median of paired ratios, its quartiles behind it. CPU "
        "ms: minimum of each rank, added: other processes disturb it least. Losses: the largest relative difference "
        "of the first three.",
        "",
        "| link | schedule | micro-batches | ms | ratio | CPU ms | CPU ratio | losses |",
        "|---|---|---|---|---|---|---|---|",
    ]


def _line(row: Row) -> str:
    return line_of([row.link, row.schedule, str(row.micro_batches), *row.cells(digits=0)])


def measure(link: str, schedule: str, micro_batches: int, rounds: int) -> Row:
    """Run a case."""
    name, virtual_stages = SCHEDULES[schedule]
    asked = {"schedule": name, "virtual_stages": virtual_stages, "micro_batches": micro_batches, "rounds": rounds}
    return row_of(link, schedule, micro_batches, run_on(link, "pipeline_worker", asked))


def main() -> int:
    """Measure, print; 1 if the losses of a case differ."""
    parser = options_on_links(__doc__, rounds=12)
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[4, 8])
    asked = parser.parse_args()
    rows = (measure(*case, asked.rounds) for case in product(asked.links, asked.schedules, asked.micro_batches))
    return report(rows, _line, _head, "pipeline_time", asked.markdown)


if __name__ == "__main__":
    sys.exit(main())
