"""Runs of three models whose ranks are killed in drawn places, and which start again on other numbers of ranks.

Usage: python -m tests.drawn_kills [--models gpt experts stages] [--count 24] [--seed 0] [--markdown FILE]

A run of `tests.restarted` starts on one to four ranks, drawn anew for each start. A drawn rank kills itself by SIGKILL
in a drawn place (`tests.kill_places`): while it traces, plans, loads, steps, updates, saves, renames or deletes. The
places take turns. Each start must go on at the latest complete checkpoint, and take each batch at its step. Its losses
must be those of a run that never stopped, up to rounding.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import autoshard
from tests.benchmarks.races import commit, date, versions
from tests.examples.scripts import ROOT
from tests.kill_places import PLACES, Kill
from tests.restarted import Loss, losses, train

STEPS, DEADLINE_S, TOLERANCE = 24, 300.0, 1e-5
MODELS = ("gpt", "experts", "stages")


@dataclass(slots=True)
class Found:
    """The kills of a model's runs.

    Args:
        within: kills within the call of a place, by place.
        behind: kills soon after the call, by place.
        runs, steps: number of runs that ended, and of steps of all starts.
        difference: the largest relative difference of a loss.
    """

    within: Counter[str] = field(default_factory=Counter)
    behind: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    steps: int = 0
    difference: float = 0.0

    @property
    def kills(self) -> int:
        """The number of kills."""
        return self.within.total() + self.behind.total()


def start(folder: Path, name: str, ranks: int, kill: Kill | None) -> bool:
    """Run a start on so many ranks, and return whether it ended the run."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    script = ["-m", "tests.restarted", str(folder), str(STEPS), "[]", name, *([] if kill is None else kill.words())]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, *launcher, *script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=environment, check=False)
    was_killed = kill is not None and (folder / "kills").exists()
    assert done.returncode == 0 or was_killed, done.stdout + done.stderr
    return done.returncode == 0


def losses_of_a_whole_run(folder: Path, name: str) -> list[float]:
    """The losses of a run on two simulated ranks that never stopped."""
    folder.mkdir()
    checkpoints = autoshard.Checkpoints(folder / "saved", every=STEPS)
    autoshard.run(lambda run: train(run, folder, STEPS, name=name, ranks=2), checkpoints=checkpoints)
    return [float.fromhex(item.loss) for item in losses(folder)]


def check(new: Sequence[Loss], first: int, ranks: int, whole: Sequence[float]) -> float:
    """Check the steps of one start, of which `first` is the expected first, against a whole run. Returns the
    largest difference of a loss."""
    assert [item.step for item in new] == list(range(first, first + len(new))), (first, new)
    assert all(item.ranks == ranks and item.place == item.step + 1 for item in new), new
    difference = 0.0
    for item in new:
        loss = float.fromhex(item.loss)
        assert math.isclose(loss, whole[item.step], rel_tol=TOLERANCE), (item, loss, whole[item.step])
        difference = max(difference, abs(loss / whole[item.step] - 1))
    return difference


def campaign(count: int, seed: int, folder: Path, name: str) -> Found:
    """Draw kills until `count` of them happened in a model's runs, and check each start."""
    draw, found = random.Random(seed), Found()
    places = itertools.cycle(draw.sample(list(PLACES), len(PLACES)))
    whole = losses_of_a_whole_run(folder / "whole", name)
    while found.kills < count:
        run, has_ended = folder / str(found.runs), False
        run.mkdir()
        (run / "losses").touch()
        while not has_ended:
            ranks, before = draw.randint(1, 4), losses(run)
            latest = autoshard.Checkpoints(run / "saved").latest
            first = 0 if latest is None else int(latest.name.removeprefix("step-"))
            kill = Kill.drawn(draw, next(places), ranks) if found.kills < count else None
            (run / "kills").unlink(missing_ok=True)
            has_ended = start(run, name, ranks, kill)
            new = losses(run)[len(before) :]
            found.difference = max(found.difference, check(new, first, ranks, whole))
            found.steps += len(new)
            if kill is not None and not has_ended:
                was_within = len((run / "kills").read_text().splitlines()) == 1
                (found.within if was_within else found.behind)[kill.place] += 1
        found.runs += 1
    return found


def line_of(name: str, found: Found) -> str:
    """A row of the Markdown table: kills within and after each place, runs, steps, and the largest difference."""
    kills = [f"{found.within[place]} + {found.behind[place]}" for place in PLACES]
    return f"| {' | '.join([name, *kills, str(found.runs), str(found.steps), f'{found.difference:.1e}'])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--count", type=int, default=24, help="kills of each model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--markdown", type=Path, help="write the page there too")
    options = parser.parse_args()
    command = " ".join(["python -m tests.drawn_kills", *sys.argv[1:]])
    lines = [
        "# Drawn kills of runs",
        "",
        f"`{command}`, {date()}, commit {commit()}, {versions()}. A start has one to four ranks. Kills: within the "
        "call of a place + soon after the call. Every start went on at its latest complete checkpoint, and took each "
        "batch at its step. Difference: the largest relative difference of a loss to a run without kills.",
        "",
        f"| model | {' | '.join(PLACES)} | runs | steps | difference |",
        f"|{'---|' * (len(PLACES) + 4)}",
    ]
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            lines.append(line_of(name, campaign(options.count, options.seed, Path(folder), name)))
        sys.stdout.write(lines[-1] + "\n")
        sys.stdout.flush()
    if options.markdown is not None:
        options.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
