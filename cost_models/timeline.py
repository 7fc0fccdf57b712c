"""The timeline of a simulated step: spans on streams of processes.

Streams belong to processes (ranks that differ; ranks that do the same at the same time are one process).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

COMPUTE = "compute"


class Span(NamedTuple):
    """When a task ran, and on which stream of which process (an index into the timeline's `processes`)."""

    name: str
    stream: str
    start_s: float
    end_s: float
    process: int = 0


@dataclass(frozen=True, slots=True)
class Timeline:
    """The simulated step: spans in the order of their tasks, and the names of the processes that they run on."""

    spans: tuple[Span, ...]
    processes: tuple[str, ...] = ("rank 0",)

    @property
    def total_s(self) -> float:
        """End of the last task."""
        return max((span.end_s for span in self.spans), default=0.0)
