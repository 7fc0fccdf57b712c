"""Runs whose ranks are killed at drawn moments, and which are started again on other numbers of ranks.

Usage: python -m tests.drawn_kills [--count 60] [--seed 0]

A run of `tests.restarted` starts on one to four ranks, drawn anew for each start. A drawn rank kills itself by SIGKILL
a drawn time after its imports: while ranks meet, plan, load, train or save. Each start must go on at the latest
complete checkpoint, and take each batch at its step. Its losses must be within 1e-6 of those of a run that never
stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import autoshard
from tests.examples.scripts import ROOT
from tests.restarted import AFTER, Loss, losses, train

STEPS, DEADLINE_S, LONGEST_S = 40, 200.0, 5.0


def start(folder: Path, ranks: int, fate: tuple[int, float] | None) -> bool:
    """Start a run on some ranks, of which one may have a fate: its rank and seconds; return whether the run ended."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    fates = [] if fate is None else [(fate[0], -1, f"{AFTER}{fate[1]}")]
    command = [sys.executable, *launcher, "-m", "tests.restarted", str(folder), str(STEPS), json.dumps(fates)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=environment, check=False)
    assert done.returncode == 0 or fate is not None, done.stdout + done.stderr
    return done.returncode == 0


def losses_of_a_whole_run(folder: Path) -> list[float]:
    """The losses of a run that never stopped, on two simulated ranks."""
    folder.mkdir()
    checkpoints = autoshard.Checkpoints(folder / "saved", every=STEPS)
    autoshard.run(lambda run: train(run, folder, STEPS, [], ranks=2), checkpoints=checkpoints)
    return [float.fromhex(item.loss) for item in losses(folder)]


def check(new: list[Loss], first: int, ranks: int, whole: list[float]) -> None:
    """Check the steps of one start, the first of which is known."""
    assert [item.step for item in new] == list(range(first, first + len(new))), (first, new)
    assert all(item.ranks == ranks and item.place == item.step + 1 for item in new), new
    for item in new:
        assert math.isclose(float.fromhex(item.loss), whole[item.step], rel_tol=1e-6), (item, whole[item.step])


def campaign(count: int, seed: int, folder: Path) -> tuple[int, int]:
    """Draw and judge `count` kills; return the number of runs that ended, and the number of their steps."""
    draw, ended, steps = random.Random(seed), 0, 0
    whole = losses_of_a_whole_run(folder / "whole")
    kills = 0
    while kills < count:
        run, has_ended = folder / str(ended), False
        run.mkdir()
        (run / "losses").touch()
        while not has_ended:
            ranks, before = draw.randint(1, 4), losses(run)
            latest = autoshard.Checkpoints(run / "saved").latest
            first = 0 if latest is None else int(latest.name.removeprefix("step-"))
            fate = (draw.randrange(ranks), draw.uniform(0, LONGEST_S)) if kills < count else None
            has_ended = start(run, ranks, fate)
            new = losses(run)[len(before) :]
            check(new, first, ranks, whole)
            kills, steps = kills + (not has_ended), steps + len(new)
        ended += 1
    return ended, steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ended, steps = campaign(options.count, options.seed, Path(folder))
    sys.stdout.write(f"{options.count} kills in {ended} runs, {steps} steps; every start went on where it should\n")


if __name__ == "__main__":
    main()
