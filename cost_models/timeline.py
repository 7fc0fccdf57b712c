"""The timeline of a simulated step: spans of time on streams.

Each stream belongs to a process. Ranks with equal timelines share one process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

COMPUTE = "compute"


class Span(NamedTuple):
    """The time in which one task runs on a stream, in seconds from the start of the step.

    `process` is an index into the timeline's `processes`.
    """

    name: str
    stream: str
    start_s: float
    end_s: float
    process: int = 0


@dataclass(frozen=True, slots=True)
class Timeline:
    """The simulated step: spans in the order of their tasks, and the names of their processes."""

    spans: tuple[Span, ...]
    processes: tuple[str, ...] = ("rank 0",)

    @property
    def total_s(self) -> float:
        """Time at which the last task ends, in seconds."""
        return max((span.end_s for span in self.spans), default=0.0)
