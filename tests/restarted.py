"""A user's script with `autoshard.run`, whose ranks can be killed, fail, hang or be late.

Usage: python -m tests.restarted FOLDER STEPS FATES [MODEL [RANK PLACE CALL SECONDS]]

FATES is a JSON list. Each start takes one entry: the rank that ends, the step before which it ends, and the way,
"kill", "memory" or "hang". "kill after 1.5" kills the rank so many seconds after its imports, and "late by 1.5"
delays the rank so long. MODEL is a name of `restarted_models`. With RANK, a rank is killed as in `kill_places`.
Each step appends a line to `FOLDER/losses`. The line has the number of the step, the loss with all digits, the
number of ranks, and the number of the batch.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import autoshard
from tests.kill_places import Kill
from tests.restarted_models import MODELS

EVERY = 4
AFTER, LATE = "kill after ", "late by "
TIMEOUT_S = 5.0


class Batches:
    """Batches in order, whose state is the number of batches that were taken."""

    def __init__(self, make: Callable[[int], dict[str, torch.Tensor]]) -> None:
        self.place, self._make = 0, make

    def take(self) -> dict[str, torch.Tensor]:
        self.place += 1
        return self._make(self.place)

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Loss(NamedTuple):
    """A line of the file of losses."""

    step: int
    loss: str
    ranks: int
    place: int


def train(
    run: autoshard.Run,
    folder: Path,
    steps: int,
    fates: Sequence[tuple[int, int, str]] = (),
    *,
    name: str = "net",
    ranks: int = 0,
) -> None:
    """The training function of `autoshard.run`, on `ranks` simulated ranks, or on the processes if it is 0."""
    start = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    rank, number, way = fates[start] if start < len(fates) else (-1, -1, "")
    if run.rank == rank and way.startswith(AFTER):
        timer = threading.Timer(float(way.removeprefix(AFTER)), meet, ("kill",))
        timer.daemon = True
        timer.start()
    if run.rank == rank and way.startswith(LATE):
        time.sleep(float(way.removeprefix(LATE)))
    torch.manual_seed(0)
    restarted = MODELS[name]
    model, batches = restarted.make(), Batches(restarted.batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.7)
    step = autoshard.compile(
        model,
        restarted.mesh(ranks or run.ranks),
        optimizer=optimizer,
        example_inputs=restarted.batch(0),
        options=autoshard.Options(timeout_s=TIMEOUT_S),
        **restarted.options,
    )
    for done in run.steps(step, steps, schedule=schedule, data=batches):
        if (run.rank, done) == (rank, number):
            meet(way)
        loss = step(**batches.take())
        schedule.step()
        if run.rank == 0:
            with Path(folder, "losses").open("a") as file:
                file.write(f"{done} {float(loss).hex()} {run.ranks} {batches.place}\n")
        time.sleep(0.02)


def meet(way: str) -> None:
    """End this process in the given way: "kill", "memory", or else a hang."""
    if way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "memory":
        raise torch.OutOfMemoryError("out of memory, says a test")
    time.sleep(3600)


def losses(folder: Path) -> list[Loss]:
    """The lines that the runs in a folder wrote."""
    lines = (line.split() for line in (folder / "losses").read_text().splitlines())
    return [Loss(int(step), loss, int(ranks), int(place)) for step, loss, ranks, place in lines]


def main() -> None:
    torch.set_num_threads(1)
    folder, steps, fates = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    name = sys.argv[4] if sys.argv[4:] else "net"
    if sys.argv[5:]:
        Kill.of(sys.argv[5:]).prepare(int(os.environ.get("RANK", "0")), folder / "kills")
    checkpoints = autoshard.Checkpoints(folder / "saved", every=EVERY, keep=2, asynchronous=not fates)
    autoshard.run(lambda run: train(run, folder, steps, fates, name=name), checkpoints=checkpoints)


if __name__ == "__main__":
    main()
