"""Rows of `tests.benchmarks.step_time`, one plan of ours beside one rival on a case: kept as JSON, shown as a table."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.step_cases import CASES, COMPARISONS, Case, Comparison

RESULTS = Path(__file__).parent / "results" / "step_time.json"
TABLE = RESULTS.with_suffix(".md")
LOOPBACK = "loopback"
LINKS = (LOOPBACK, "1gbit")
LOSS_TOLERANCE = 1e-3

Found = Mapping[str, Mapping[str, Any]]
"""By contender, what the first rank found."""


@dataclass(frozen=True, slots=True)
class Side:
    """One contender: median step time and processor time, received bytes in a step, peak memory, collectives."""

    step_s: float
    cpu_s: float
    received_bytes: int
    peak_bytes: int | None
    collectives: Mapping[str, int]
    loss: float


@dataclass(frozen=True, slots=True)
class Row:
    """One plan of ours and one rival; `ratio` is the median of paired ratios, with its quartiles.

    `rival` is "best of ..." where the fastest of several counts. `error` says why there is nothing else.
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
        """The case, where it ran and what it compares."""
        return (self.model, self.tokens, self.link, self.ours, self.rival)

    @property
    def is_met(self) -> bool:
        """Whether the ratio of step times is at most the target, and both computed the same loss."""
        return self.ratio is not None and not self.error and self.ratio <= self.target

    @property
    def memory_ratio(self) -> float | None:
        """Our peak memory over the rival's."""
        if self.our_side is None or self.rival_side is None:
            return None
        ours, rivals = self.our_side.peak_bytes, self.rival_side.peak_bytes
        return ours / rivals if ours and rivals else None


def expected(cases: Sequence[Case] = CASES, names: Iterable[str] = COMPARISONS, link: str = LOOPBACK) -> list[Row]:
    """Rows without figures: all that is to be measured. A mesh of one has no link."""
    return [
        row
        for case in cases
        for name in names
        if COMPARISONS[name].ranks > 1 or link == LOOPBACK
        for row in _empty_rows(case, COMPARISONS[name], link)
    ]


def _empty_rows(case: Case, comparison: Comparison, link: str) -> list[Row]:
    rivals = comparison.rivals
    if comparison.best is not None:
        rivals = {f"best of {', '.join(rivals)}": comparison.best}
    return [
        Row(case.model, case.tokens, case.batch, link, comparison.ours, rival, target)
        for rival, target in rivals.items()
    ]


def fill(row: Row, comparison: Comparison, found: Found, peaks: Mapping[str, int]) -> dict[str, Any]:
    """The figures of a row, as its fields."""
    sides = {name: _side(found[name], peaks.get(name)) for name in comparison.contenders}
    rival = row.rival if row.rival in sides else min(comparison.rivals, key=lambda name: sides[name].step_s)
    pairs = zip(found[row.ours]["times_s"], found[rival]["times_s"], strict=True)
    ratios = [ours / theirs for ours, theirs in pairs]
    low, middle, high = statistics.quantiles(ratios, n=4)
    ours, theirs = sides[row.ours], sides[rival]
    differs = abs(ours.loss / theirs.loss - 1) > LOSS_TOLERANCE
    return {
        "rounds": len(ratios),
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
        cpu_s=statistics.median(found["cpu_s"]),
        received_bytes=found["received_bytes"],
        peak_bytes=peak_bytes,
        collectives=found["collectives"],
        loss=found["loss"],
    )


def read_rows() -> list[Row]:
    """All rows that are saved."""
    if not RESULTS.exists():
        return []
    return [_row(saved) for saved in json.loads(RESULTS.read_text())["rows"]]


def _row(saved: dict[str, Any]) -> Row:
    sides = {name: saved[name] and Side(**saved[name]) for name in ("our_side", "rival_side")}
    return Row(**{**saved, **sides, "quartiles": saved["quartiles"] and tuple(saved["quartiles"])})


def save(rows: Iterable[Row]) -> None:
    """Merge rows into the file and write the table: of the same case and rival, the new row counts."""
    merged = {row.key: row for link in LINKS for row in expected(link=link)}
    merged |= {row.key: row for row in (*read_rows(), *rows)}
    kept = list(merged.values())
    RESULTS.write_text(json.dumps({"rows": [asdict(row) for row in kept]}, indent=1) + "\n")
    TABLE.write_text(markdown(kept))


def markdown(rows: Sequence[Row]) -> str:
    """The page of all rows."""
    ran = [row for row in rows if row.ratio is not None]
    met = [row for row in ran if row.is_met]
    memory = [row.memory_ratio for row in ran if row.memory_ratio is not None]
    lines = [
        "# Step time beside the same step by hand",
        "",
        "`python -m tests.benchmarks.step_time` (with `--link 1gbit` for two emulated hosts) writes this page.",
        "",
        f"Of {len(rows)} cases {len(ran)} have run; {len(met)} of them meet their target of step time; in "
        f"{sum(ratio <= 1 for ratio in memory)} of {len(memory)} our peak memory is at most the rival's.",
        "",
        "Two ranks of one thread, each pinned to a core, or one rank; contenders in turns, round after round, in one "
        "process group. ms: medians of the slowest rank; CPU ms: what the first rank worked, its communication threads "
        "included, which other processes disturb less. ratio: median of paired ratios, its quartiles behind it. MB: "
        "received by a rank in a step. MiB: peak of a rank, each contender in processes of its own. Load: of the "
        "machine when the case began, other processes included.",
    ]
    for link in dict.fromkeys(row.link for row in rows):
        lines += ["", f"## {link}", "", *_table([row for row in rows if row.link == link])]
    return "\n".join(lines) + "\n"


_HEAD = ("case", "ours", "rival", "target", "ratio", "met", "ms", "CPU ms", "MB", "MiB", "commit, date, load")


def _table(rows: Iterable[Row]) -> list[str]:
    lines = [f"| {' | '.join(_HEAD)} |", f"|{'---|' * len(_HEAD)}"]
    return lines + [f"| {' | '.join(_cells(row))} |" for row in rows]


def _cells(row: Row) -> list[str]:
    case = [f"{row.model}, {row.tokens} x {row.batch}", row.ours, row.rival, f"{row.target:.2f}"]
    if row.ratio is None or row.our_side is None or row.rival_side is None or row.quartiles is None:
        return [*case, "", f"error: {row.error}" if row.error else "not run", *[""] * 4, _source(row)]
    low, high = row.quartiles
    ours, rival = row.our_side, row.rival_side
    fastest = "" if row.fastest == row.rival else f" ({row.fastest})"
    peaks = " / ".join(f"{side.peak_bytes / 2**20:.0f}" for side in (ours, rival) if side.peak_bytes)
    return [
        *case,
        f"{row.ratio:.2f} ({low:.2f} to {high:.2f})",
        f"error: {row.error}" if row.error else "yes" if row.is_met else "no",
        f"{ours.step_s * 1e3:.0f} / {rival.step_s * 1e3:.0f}{fastest}",
        f"{ours.cpu_s * 1e3:.0f} / {rival.cpu_s * 1e3:.0f}",
        f"{ours.received_bytes / 1e6:.2f} / {rival.received_bytes / 1e6:.2f}",
        peaks,
        _source(row),
    ]


def _source(row: Row) -> str:
    return f"{row.commit}, {row.date}, {row.load:.1f}" if row.date else ""
