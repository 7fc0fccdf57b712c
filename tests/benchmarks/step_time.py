"""Step times of our plans beside the same step written by hand in PyTorch.

Run::

    python -m tests.benchmarks.step_time                  every case on loopback, hours; each case is saved as it ends
    python -m tests.benchmarks.step_time --link 1gbit     on two emulated hosts (root)
    python -m tests.benchmarks.step_time --models llama --tokens 128 --contenders data sharded --rounds 8
    python -m tests.benchmarks.step_time --report         the table of what is saved

1. Each comparison of a case is a race of its own (`tests.benchmarks.races`): two ranks, one for a mesh of one.
2. Rivals are tuned first: DDP's bucket size, FSDP2's prefetching, DTensor's loss. The reported figures are the median
   of the rounds, and the median of paired ratios.
3. `tests.benchmarks.step_worker` counts bytes and peak memory.
4. Rows are merged into results/step_time.json, the table into results/step_time.md. A failure is a row with its error.

Targets, ours over the rival: DDP 1.0, FSDP2 0.95, DTensor 0.75, eager and `torch.compile` 1.0. The planner's free
choice has the target 0.95 of the best rival. Peak memory is at most the rival's.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from tests.benchmarks.races import LOOPBACK, WorkerError, commit, date, paired_quartiles, parser_of, run_order, versions
from tests.benchmarks.step_cases import CASES, COMPARISONS, Case, Comparison
from tests.benchmarks.two_hosts import TwoHosts

RESULTS = Path(__file__).parent / "results" / "step_time.json"
TABLE = RESULTS.with_suffix(".md")
LINKS = (LOOPBACK, "1gbit")
LOSS_TOLERANCE = 1e-3

Found = Mapping[str, Mapping[str, Any]]
"""The first rank's findings by contender."""


@dataclass(frozen=True, slots=True)
class Side:
    """The figures of one contender: medians of step and processor time, received bytes of a step, peak memory, and
    collectives."""

    step_s: float
    cpu_s: float
    received_bytes: int
    peak_bytes: int | None
    collectives: Mapping[str, int]
    loss: float


@dataclass(frozen=True, slots=True)
class Row:
    """One plan of ours and one rival. `ratio` is the median of paired ratios, with its quartiles.

    `rival` is "best of ..." if the fastest of several counts. `error` is the reason for missing figures.
    """

    model: str
    tokens: int
    batch: int
    link: str
    ours: str
    rival: str
    target: float
    rounds: int = 0
    ratio: float | None = None
    quartiles: tuple[float, float] | None = None
    our_side: Side | None = None
    rival_side: Side | None = None
    fastest: str = ""
    error: str = ""
    versions: str = ""
    commit: str = ""
    date: str = ""
    load: float = 0.0

    @property
    def key(self) -> tuple[Any, ...]:
        """Return the key of the case, its place and its comparison."""
        return (self.model, self.tokens, self.link, self.ours, self.rival)

    @property
    def is_met(self) -> bool:
        """Whether the ratio of step times is at most the target, and both losses agree."""
        return self.ratio is not None and not self.error and self.ratio <= self.target

    @property
    def memory_ratio(self) -> float | None:
        """Our peak memory over the rival's."""
        peaks = [side.peak_bytes if side else None for side in (self.our_side, self.rival_side)]
        return peaks[0] / peaks[1] if peaks[0] and peaks[1] else None


def expected(cases: Sequence[Case] = CASES, names: Iterable[str] = COMPARISONS, link: str = LOOPBACK) -> list[Row]:
    """Rows without figures for all measurements. On a link there are no rows for a mesh of one."""
    rows = []
    for case in cases:
        for comparison in map(COMPARISONS.__getitem__, names):
            if comparison.ranks > 1 or link == LOOPBACK:
                best = {f"best of {', '.join(comparison.rivals)}": comparison.best}
                rivals: Mapping[str, Any] = comparison.rivals if comparison.best is None else best
                shape = (case.model, case.tokens, case.batch, link, comparison.ours)
                rows += [Row(*shape, rival, target) for rival, target in rivals.items()]
    return rows


def fill(row: Row, comparison: Comparison, found: Found, peaks: Mapping[str, int]) -> dict[str, Any]:
    """The figures of a row: rounds, ratio, both sides, and an error if the first losses differ."""
    sides = {name: _side(found[name], peaks.get(name)) for name in comparison.contenders}
    rival = row.rival if row.rival in sides else min(comparison.rivals, key=lambda name: sides[name].step_s)
    low, middle, high = paired_quartiles(found[row.ours]["times_s"], found[rival]["times_s"])
    ours, theirs = sides[row.ours], sides[rival]
    differs = abs(ours.loss / theirs.loss - 1) > LOSS_TOLERANCE
    return {
        "rounds": len(found[rival]["times_s"]),
        "ratio": middle,
        "quartiles": (low, high),
        "our_side": ours,
        "rival_side": theirs,
        "fastest": rival,
        "error": f"the first losses differ: {ours.loss:.6f} and {theirs.loss:.6f}" if differs else "",
    }


def _side(found: Mapping[str, Any], peak_bytes: int | None) -> Side:
    return Side(
        step_s=statistics.median(found["times_s"]),
        cpu_s=statistics.median(of_ranks[0] for of_ranks in found["cpu_s"]),
        received_bytes=found["received_bytes"],
        peak_bytes=peak_bytes,
        collectives=found["collectives"],
        loss=found["losses"][0],
    )


def read_rows() -> list[Row]:
    """All rows of the file of results."""
    return [_row(saved) for saved in json.loads(RESULTS.read_text())["rows"]] if RESULTS.exists() else []


def _row(saved: dict[str, Any]) -> Row:
    sides = {name: saved[name] and Side(**saved[name]) for name in ("our_side", "rival_side")}
    return Row(**{**saved, **sides, "quartiles": saved["quartiles"] and tuple(saved["quartiles"])})


def save(rows: Iterable[Row]) -> None:
    """Merge rows into the file and write the table; a new row replaces the row of the same case and rival."""
    merged = {row.key: row for link in LINKS for row in expected(link=link)}
    merged |= {row.key: row for row in (*read_rows(), *rows)}
    kept = list(merged.values())
    RESULTS.write_text(json.dumps({"rows": [asdict(row) for row in kept]}, indent=1) + "\n")
    TABLE.write_text(markdown(kept))


_HEAD = ("case", "ours", "rival", "target", "ratio", "met", "ms", "CPU ms", "MB", "MiB", "commit, date, load")


def markdown(rows: Sequence[Row]) -> str:
    """The page of all rows in Markdown."""
    ran = [row for row in rows if row.ratio is not None]
    memory = [row.memory_ratio for row in ran if row.memory_ratio is not None]
    lines = [
        "# Step time beside the same step by hand",
        "",
        "`python -m tests.benchmarks.step_time` (with `--link 1gbit` for two emulated hosts) writes this page.",
        "",
        f"Of {len(rows)} cases {len(ran)} have run; {sum(row.is_met for row in ran)} of them meet their target of step "
        f"time; in {sum(ratio <= 1 for ratio in memory)} of {len(memory)} our peak memory is at most the rival's.",
        "",
        "Two ranks of one thread, each pinned to a core, or one rank; contenders in turns, round after round, in one "
        "process group. ms: medians of the slowest rank; CPU ms: what the first rank worked, its communication threads "
        "included, which other processes disturb less. ratio: median of paired ratios, its quartiles behind it. MB: "
        "received by a rank in a step. MiB: peak of a rank, each contender in processes of its own. Load: of the "
        "machine when the case began, other processes included.",
    ]
    for link in dict.fromkeys(row.link for row in rows):
        lines += ["", f"## {link}", "", f"| {' | '.join(_HEAD)} |", f"|{'---|' * len(_HEAD)}"]
        lines += [f"| {' | '.join(_cells(row))} |" for row in rows if row.link == link]
    return "\n".join(lines) + "\n"


def _cells(row: Row) -> list[str]:
    case = [f"{row.model}, {row.tokens} x {row.batch}", row.ours, row.rival, f"{row.target:.2f}"]
    source = f"{row.commit}, {row.date}, {row.load:.1f}" if row.date else ""
    if row.ratio is None or row.our_side is None or row.rival_side is None or row.quartiles is None:
        return [*case, "", f"error: {row.error}" if row.error else "not run", *[""] * 4, source]
    sides = (row.our_side, row.rival_side)
    return [
        *case,
        f"{row.ratio:.2f} ({row.quartiles[0]:.2f} to {row.quartiles[1]:.2f})",
        f"error: {row.error}" if row.error else "yes" if row.is_met else "no",
        " / ".join(f"{side.step_s * 1e3:.0f}" for side in sides) + (f" ({row.fastest})" * (row.fastest != row.rival)),
        " / ".join(f"{side.cpu_s * 1e3:.0f}" for side in sides),
        " / ".join(f"{side.received_bytes / 1e6:.2f}" for side in sides),
        " / ".join(f"{side.peak_bytes / 2**20:.0f}" for side in sides if side.peak_bytes),
        source,
    ]


def measure(
    case: Case, comparison: Comparison, empty: Sequence[Row], hosts: TwoHosts | None, rounds: int, weighs: bool
) -> list[Row]:
    """The rows of one comparison of a case with their figures, or with the error of a failed run."""

    def run(contenders: Sequence[str], *, memory: bool = False) -> dict[str, Any]:
        order = {"case": asdict(case), "contenders": contenders, "rounds": rounds, "memory": memory}
        return run_order("step_worker", order, comparison.ranks, hosts, memory=memory)

    load = os.getloadavg()[0]
    try:
        found = run(comparison.contenders)
        weighed = comparison.contenders if weighs else []
        peaks = {name: run([name], memory=True)[name]["peak_bytes"] for name in weighed}
        figures = [fill(row, comparison, found, peaks) for row in empty]
    except WorkerError as error:
        figures = [{"error": str(error)} for _ in empty]
    source = {"versions": versions(), "commit": commit(), "date": date(), "load": load}
    return [replace(row, **found, **source) for row, found in zip(empty, figures, strict=True)]


def main() -> None:
    """Measure case by case, save and print."""
    parser, models = parser_of(__doc__, rounds=20), list(dict.fromkeys(case.model for case in CASES))
    parser.add_argument("--models", nargs="+", default=models, choices=models)
    parser.add_argument("--tokens", type=int, nargs="+", help="128, 1024; of an image its class token is one more")
    parser.add_argument("--contenders", nargs="+", default=list(COMPARISONS), choices=list(COMPARISONS))
    parser.add_argument("--link", metavar="RATE", help="two emulated hosts, joined at 1gbit, 200mbit, ...; needs root")
    parser.add_argument("--no-memory", action="store_true", help="leave peak memory out: half the runs")
    parser.add_argument("--no-save", action="store_true", help="print the rows, and leave the results as they are")
    parser.add_argument("--report", action="store_true", help="measure nothing; show what is saved")
    asked, console = parser.parse_args(), Console(width=200)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that emulated hosts are taken down
    if asked.report:
        console.print(Markdown(TABLE.read_text()))
        return
    cases = [case for case in CASES if case.model in asked.models and (not asked.tokens or case.tokens in asked.tokens)]
    with TwoHosts(asked.link) if asked.link else nullcontext() as hosts:
        for case in cases:
            for name in asked.contenders:
                empty = expected([case], [name], asked.link or LOOPBACK)
                rows = (
                    measure(case, COMPARISONS[name], empty, hosts, asked.rounds, not asked.no_memory) if empty else []
                )
                for row in rows:
                    console.print(row)
                if not asked.no_save:
                    save(rows)


if __name__ == "__main__":
    main()
