"""The page of `tests.benchmarks.gpu_kernels`: medians, rates, and met targets.

Targets of kernels on an H200, by their bound:

* Memory: at least 85 % of a copy's bandwidth, and as fast as Inductor and Liger-Kernel.
* Attention: 0.9 times as fast as the fastest of torch's backends.
* A Llama block: 1.1 times as fast in training as under `torch.compile`.
* Products: the speed of Liger-Kernel.

Bandwidth is not judged in cases of less than 64 MiB.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tests.benchmarks.gpu_case import Kind

COPY_SHARE, ATTENTION_SPEED, BLOCK_SPEED = 0.85, 0.9, 1.1
# With less to move, a launch is what takes the time, and the cache holds it all.
LEAST_BYTES = 2**26
_TIMES = ("ours ms", "predicted ms", "torch.compile ms", "eager ms", "Liger ms")
_COLUMNS = ("kernel", *_TIMES, "rate", "of copy", "targets")


@dataclass(frozen=True, slots=True)
class Verdict:
    """A target, which is met if `reached` is at least `least`."""

    name: str
    reached: float
    least: float

    @property
    def is_met(self) -> bool:
        """Whether `reached` is at least `least`."""
        return self.reached >= self.least

    def __str__(self) -> str:
        return f"{'pass' if self.is_met else 'FAIL'} {self.name} {self.reached:.2f} (>= {self.least:.2f})"


@dataclass(frozen=True, slots=True)
class Row:
    """Medians in milliseconds, or None with an explanation in `notes`.

    Args:
        name: name of the case.
        kind: the bound of the case.
        predicted_ms: time by the cost model.
        ours_ms, compiled_ms, eager_ms, liger_ms: measured times; eager attention is torch's fastest backend.
        moved_bytes, flops: sizes of the case.
        notes: failures.
        copy_bytes_per_s: measured bandwidth of a copy, read plus written.
    """

    name: str
    kind: Kind
    predicted_ms: float
    ours_ms: float | None
    compiled_ms: float | None
    eager_ms: float | None
    liger_ms: float | None
    moved_bytes: float
    flops: float
    notes: tuple[str, ...] = ()
    copy_bytes_per_s: float = 0.0

    @property
    def rate(self) -> float | None:
        """Bytes per second for a case that memory bounds, FLOPs per second for another case, and None
        without a time."""
        if self.ours_ms is None:
            return None
        return (self.moved_bytes if self.kind is Kind.MEMORY else self.flops) / (self.ours_ms / 1e3)

    @property
    def copy_share(self) -> float | None:
        """The rate as a share of a copy's, or None for a case that memory does not bound or that has no time."""
        if self.kind is not Kind.MEMORY or self.rate is None or not self.copy_bytes_per_s:
            return None
        return self.rate / self.copy_bytes_per_s

    def verdicts(self) -> tuple[Verdict, ...]:
        """The targets for which the row has measurements."""
        return tuple(self._verdicts())

    def _verdicts(self) -> Iterator[Verdict]:
        if self.copy_share is not None and self.moved_bytes >= LEAST_BYTES:
            yield Verdict("copy", self.copy_share, COPY_SHARE)
        others = {
            Kind.MEMORY: (("Inductor", self.compiled_ms, 1.0), ("Liger", self.liger_ms, 1.0)),
            Kind.PRODUCTS: (("Liger", self.liger_ms, 1.0),),
            Kind.ATTENTION: (("torch's best", self.eager_ms, ATTENTION_SPEED),),
            Kind.BLOCK: (("torch.compile", self.compiled_ms, BLOCK_SPEED),),
        }
        for name, theirs_ms, least in others[self.kind]:
            if theirs_ms is not None and self.ours_ms is not None:
                yield Verdict(name, theirs_ms / self.ours_ms, least)

    def cells(self) -> tuple[str, ...]:
        """The cells of a row in the table."""
        times = (self.ours_ms, self.predicted_ms, self.compiled_ms, self.eager_ms, self.liger_ms)
        unit, scale = ("GB/s", 1e9) if self.kind is Kind.MEMORY else ("TFLOP/s", 1e12)
        rate = "" if self.rate is None else f"{self.rate / scale:.0f} {unit}"
        share = "" if self.copy_share is None else f"{self.copy_share:.0%}"
        shown = ("" if time_ms is None else f"{time_ms:.3f}" for time_ms in times)
        return (self.name, *shown, rate, share, "; ".join(map(str, self.verdicts())))


def page(facts: Mapping[str, str], rows: Sequence[Row]) -> str:
    """Return the page as Markdown: facts, number of met targets, the table, and failures."""
    verdicts = [verdict for row in rows for verdict in row.verdicts()]
    met = sum(verdict.is_met for verdict in verdicts)
    lines = [
        "# Kernels on a GPU",
        "",
        "By `make gpu-bench`: medians, side by side in one process. Of attention, eager is torch's fastest backend.",
        "",
        *(f"* {name}: {value}" for name, value in facts.items()),
        f"* targets: {met} of {len(verdicts)} met, {len(rows)} rows",
        "",
        f"| {' | '.join(_COLUMNS)} |",
        "|---" * len(_COLUMNS) + "|",
        *(f"| {' | '.join(row.cells())} |" for row in rows),
    ]
    notes = [f"* {row.name}: {note}" for row in rows for note in row.notes]
    return "\n".join([*lines, *(["", "What could not be timed:", "", *notes] if notes else []), ""])
