"""Places in a run at which a process kills itself by SIGKILL, at a random time after a call of a function begins.

Tracing, planning and loading happen once in a process. Steps, updates and saves repeat.
"""

from __future__ import annotations

import functools
import os
import random
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoshard import Checkpoints, TrainStep
from autoshard.checkpoints import folder as folders
from autoshard.checkpoints.files import Writer
from autoshard.runtime.distributed import DistributedEngine
from autoshard.runtime.engine import SimulatorEngine
from autoshard.runtime.traced_step import TracedStep
from passes.driver.planner import Planner


@dataclass(frozen=True, slots=True)
class Place:
    """Functions whose calls are a place for a kill.

    Args:
        functions: owner and name of each function.
        longest_s: about the longest time of a call, in seconds.
        calls: one of this many calls of a process is drawn.
        on_first_rank: whether only the first rank calls them.
    """

    functions: tuple[tuple[Any, str], ...]
    longest_s: float
    calls: int = 1
    on_first_rank: bool = False


PLACES: Mapping[str, Place] = {
    "tracing": Place(((Planner, "trace"),), 0.8),
    "planning": Place(((SimulatorEngine, "share"), (DistributedEngine, "share")), 0.8),
    "load": Place(((Checkpoints, "load"),), 0.05),
    "step": Place(((TrainStep, "__call__"),), 0.012, calls=20),
    "update": Place(((TracedStep, "_update"),), 0.004, calls=20),
    "save": Place(((Writer, "write"),), 0.01, calls=5),
    "rename": Place(((folders, "commit"),), 0.003, calls=5, on_first_rank=True),
    "delete": Place(((folders, "keep_latest"),), 0.003, calls=5, on_first_rank=True),
}


@dataclass(frozen=True, slots=True)
class Kill:
    """A kill of a rank, in call number `call` of a place, `after_s` seconds after the call begins."""

    rank: int
    place: str
    call: int
    after_s: float

    @classmethod
    def drawn(cls, draw: random.Random, name: str, ranks: int) -> Kill:
        """A kill at a random rank, call of the place, and time."""
        place = PLACES[name]
        rank = 0 if place.on_first_rank else draw.randrange(ranks)
        return cls(rank, name, draw.randint(1, place.calls), round(draw.uniform(0, place.longest_s), 4))

    @classmethod
    def of(cls, words: Sequence[str]) -> Kill:
        """Return the kill of `words`."""
        rank, place, call, after_s = words
        return cls(int(rank), place, int(call), float(after_s))

    def words(self) -> list[str]:
        """Return the kill as arguments of a command."""
        return [str(self.rank), self.place, str(self.call), str(self.after_s)]

    def prepare(self, rank: int, told: Path) -> None:
        """Arrange the kill if this process is the rank. A line is written to `told` when the call begins, and when
        it ends."""
        if rank != self.rank:
            return
        calls = [0]
        for owner, name in PLACES[self.place].functions:
            setattr(owner, name, self._killing(getattr(owner, name), calls, told))

    def _killing(self, function: Callable[..., Any], calls: list[int], told: Path) -> Callable[..., Any]:
        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] != self.call:
                return function(*args, **kwargs)
            _tell(told, f"{self.place} begins")
            timer = threading.Timer(self.after_s, os.kill, (os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()
            result = function(*args, **kwargs)
            _tell(told, f"{self.place} ends")
            return result

        return called


def _tell(told: Path, line: str) -> None:
    with told.open("a") as file:
        file.write(f"{line}\n")
