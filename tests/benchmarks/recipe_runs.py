"""Facts about each published run beside its search: kept as a line of JSON for each."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.recipe_steps import Step, Taken

LOWER = 0.8
"""Plans that cost less of the published recipe have their reason told."""


@dataclass(frozen=True, slots=True)
class Priced:
    """A recipe with its price.

    Args:
        words: what it does.
        seconds: of a step.
        memory: bytes of the fullest rank, by what they are.
    """

    words: str
    seconds: float
    memory: Mapping[str, int]

    @property
    def memory_bytes(self) -> int:
        """All bytes."""
        return sum(self.memory.values())


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a plan is priced far below a published recipe.

    Args:
        steps: from the one to the other, see `recipe_steps`.
        lacking: what of the plan the run's software did not offer, in words.
        offered_s: the fastest that it offered; None where nothing that it offered fits.
        roomy_s: the fastest that it offered with some memory left free; likewise.
    """

    steps: tuple[Step, ...]
    lacking: tuple[str, ...]
    offered_s: float | None
    roomy_s: float | None


@dataclass(frozen=True, slots=True)
class Compared:
    """A published run beside what was found.

    Args:
        run, source: its id in the data, and the key of its source.
        task: a digest: runs with the same one were searched together.
        device_bytes: memory of a device.
        measured_s: of a step, where it was published.
        published: the recipe that was run.
        found: the fastest, None if nothing was found in time.
        bound_s: nothing is faster than this.
        is_proven: whether the search came to its end.
        search_s: seconds of CPU of the task's search.
        reason: where the found one is priced far lower.
        on_device_s: of the fastest that keeps all on the device, where the found one does not; None if none fits, too.
    """

    run: str
    source: str
    task: str
    device_bytes: int
    measured_s: float | None
    published: Priced
    found: Priced | None
    bound_s: float
    is_proven: bool
    search_s: float
    reason: Reason | None = None
    on_device_s: float | None = None

    @property
    def ratio(self) -> float:
        """Found over published; infinite where nothing was found."""
        return math.inf if self.found is None else self.found.seconds / self.published.seconds

    @property
    def fits(self) -> bool:
        """Whether the published recipe fits in memory, by our count."""
        return self.published.memory_bytes <= self.device_bytes

    @property
    def found_fits(self) -> bool:
        """Whether the found one does."""
        return self.found is not None and self.found.memory_bytes <= self.device_bytes

    @property
    def gap(self) -> float:
        """How far the found one may be above the fastest, as a share of it."""
        return math.inf if self.found is None else self.found.seconds / self.bound_s - 1 if self.bound_s else math.inf

    @property
    def holds(self) -> bool:
        """Whether the found one fits and, if the published one does too, is priced no higher."""
        return self.found_fits and (not self.fits or self.ratio <= 1.0)


def write_line(compared: Compared) -> str:
    """One line of JSON."""
    return json.dumps(asdict(compared)) + "\n"


def read_lines(path: Path) -> list[Compared]:
    """Read the kept lines; nothing where there is no file."""
    return [_read(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def _read(said: dict[str, Any]) -> Compared:
    found, reason = said["found"], said["reason"]
    priced = {"published": Priced(**said["published"]), "found": None if found is None else Priced(**found)}
    return Compared(**{**said, **priced, "reason": None if reason is None else _reason(reason)})


def _reason(said: Mapping[str, Any]) -> Reason:
    steps = tuple(Step(tuple(step["parts"]), Taken(**step["taken"])) for step in said["steps"])
    return Reason(steps, tuple(said["lacking"]), said["offered_s"], said["roomy_s"])


def by_task(compared: Iterable[Compared]) -> dict[str, list[Compared]]:
    """Runs that were searched together."""
    tasks: dict[str, list[Compared]] = {}
    for item in compared:
        tasks.setdefault(item.task, []).append(item)
    return tasks


def lower(compared: Sequence[Compared]) -> list[Compared]:
    """Runs whose reason is told, lowest ratio first."""
    return sorted((item for item in compared if item.fits and item.ratio < LOWER), key=lambda item: item.ratio)
