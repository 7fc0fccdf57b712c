"""Runs that continue after kills, errors, hangs and signals, on the ranks that are available."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import autoshard
from autoshard import NotAvailableError
from autoshard.restarts import STOPPED
from tests.drawn_kills import MODELS, campaign
from tests.examples.scripts import ROOT
from tests.restarted import AFTER, EVERY, LATE, Loss, losses, train

DEADLINE_S = 200.0
STEPS = 11
SEED = 238
"""Draws the first kill in the second rename of a checkpoint, on two ranks, and the next start on one."""


def start(
    folder: Path, ranks: int | None, *, steps: int = STEPS, fates: Sequence[tuple[int, int, str]] = ()
) -> subprocess.Popen[str]:
    """Start the script under torchrun, or alone if `ranks` is None."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--max-restarts", "3", "--nproc-per-node", str(ranks)]
    script = ["-m", "tests.restarted", str(folder), str(steps), json.dumps(fates)]
    command = [sys.executable, *(launcher if ranks is not None else []), *script]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "10"
    return subprocess.Popen(
        command, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process: subprocess.Popen[str], status: int | None = 0) -> str:
    """The output of a process. The process must end with `status`, or with any status but 0 if it is None."""
    try:
        out, _ = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    assert process.returncode != 0 if status is None else process.returncode == status, out
    return out


def steps_of(found: Sequence[Loss]) -> dict[int, float]:
    """The loss of each step, the last one if a step was repeated."""
    return {item.step: float.fromhex(item.loss) for item in found}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of a run that never stopped, on two simulated ranks."""
    folder = tmp_path_factory.mktemp("whole")
    checkpoints = autoshard.Checkpoints(folder / "saved", every=STEPS)
    autoshard.run(lambda run: train(run, folder, STEPS, ranks=2), checkpoints=checkpoints)
    return steps_of(losses(folder))


def test_a_kill(tmp_path: Path, whole: dict[int, float]) -> None:
    """After a kill, losses equal those of a run that never stopped bit for bit, and each step takes its own batch."""
    finish(start(tmp_path, 2, fates=[(1, 6, "kill")]))
    found = losses(tmp_path)
    assert steps_of(found) == whole
    assert [item.step for item in found] == [*range(6), *range(4, STEPS)]
    assert all(item.place == item.step + 1 for item in found)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_kills_at_drawn_moments(tmp_path: Path, whole: dict[int, float], seed: int) -> None:
    """With two kills at random times and one late rank, the launcher restarts the run, whose losses are those of
    an unstopped run."""
    draw = random.Random(seed)
    kills = [(draw.randrange(2), -1, f"{AFTER}{draw.uniform(0, 5)}") for _ in range(2)]
    finish(start(tmp_path, 2, fates=[*kills, (draw.randrange(2), -1, f"{LATE}1")]))
    assert steps_of(losses(tmp_path)) == whole


@pytest.mark.slow
def test_an_error_and_a_hang(tmp_path: Path, whole: dict[int, float]) -> None:
    """After an error and after a hang of a rank, each named in the output, losses equal an unstopped
    run's bit for bit."""
    out = finish(start(tmp_path, 2, fates=[(0, 6, "memory"), (1, 9, "hang")]))
    found = losses(tmp_path)
    assert steps_of(found) == whole
    assert [item.step for item in found] == [*range(6), *range(4, 9), *range(8, STEPS)]
    assert "out of memory, says a test" in out
    assert re.search(r"LostRankError: Ranks \[1\] did not come within \d+ s", out)


@pytest.mark.slow
def test_a_signal_and_other_ranks(tmp_path: Path, whole: dict[int, float]) -> None:
    """SIGTERM saves the last step, and runs on three ranks and on one continue from there."""
    process = start(tmp_path, 2, steps=10**6)
    end = time.monotonic() + DEADLINE_S
    while not (tmp_path / "losses").exists() and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out = finish(process, status=None)
    done = len(losses(tmp_path))
    assert f"SIGTERM: the run ends; {done} of 1000000 steps are done and saved" in out
    assert autoshard.Checkpoints(tmp_path / "saved").latest == tmp_path / "saved" / f"step-{done}"
    finish(start(tmp_path, 3, steps=done + 2))
    finish(start(tmp_path, None, steps=done + 3))
    found = losses(tmp_path)
    assert [item.step for item in found] == list(range(done + 3))
    assert [item.ranks for item in found[done:]] == [3, 3, 1]
    assert all(item.place == item.step + 1 for item in found)
    alike = [step for step in steps_of(found) if step in whole]
    assert [steps_of(found)[step] for step in alike] == pytest.approx([whole[step] for step in alike], rel=1e-6)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        pytest.param("gpt", 1, id="gpt", marks=pytest.mark.slow),
        *(pytest.param(name, 8, id=f"{name}, each place", marks=pytest.mark.slow) for name in MODELS),
    ],
)
def test_drawn_kills(name: str, count: int, tmp_path: Path) -> None:
    """After kills at random places, on random numbers of ranks, each start continues from the latest checkpoint
    with the right losses."""
    assert campaign(count, seed=SEED, folder=tmp_path, name=name).kills == count


def test_a_process_alone_ends_with_its_status(tmp_path: Path) -> None:
    """Without a launcher, SIGTERM ends the process with status 143, however often it is sent."""
    process = start(tmp_path, None, steps=10**6)
    end = time.monotonic() + DEADLINE_S
    while not (tmp_path / "losses").exists() and time.monotonic() < end:
        time.sleep(0.05)
    for _ in range(3):
        process.terminate()
    finish(process, status=STOPPED)
    assert STOPPED == 143


def make_step() -> autoshard.TrainStep:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = autoshard.compile(model, autoshard.Mesh({"data": 2}), optimizer=optimizer, loss_fn=lambda y: y.sum())
    assert isinstance(step, autoshard.TrainStep)
    return step


def test_the_last_step_is_saved(tmp_path: Path) -> None:
    """The last step is saved although `every` is larger. A finished run makes no step, and returns the function's
    result."""
    handler, checkpoints = signal.getsignal(signal.SIGTERM), autoshard.Checkpoints(tmp_path, every=EVERY)

    def train(run: autoshard.Run) -> list[int]:
        step = make_step()
        return [number for number in run.steps(step, 3) if step(torch.ones(2, 2)).isfinite()]

    assert autoshard.run(train, checkpoints=checkpoints) == [0, 1, 2]
    assert checkpoints.latest == tmp_path / "step-3"
    assert autoshard.run(train, checkpoints=checkpoints) == []
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_training_function_may_end_early(tmp_path: Path) -> None:
    """If the function ends before `until`, the last checkpoint is the last due one."""
    checkpoints = autoshard.Checkpoints(tmp_path, every=2)

    def train(run: autoshard.Run) -> int:
        step = make_step()
        for number in run.steps(step, 10):
            step(torch.ones(2, 2))
            if number == 2:
                return number
        return -1

    assert autoshard.run(train, checkpoints=checkpoints) == 2
    assert checkpoints.latest == tmp_path / "step-2"


def test_a_data_loader_keeps_its_place(tmp_path: Path) -> None:
    """A run in three parts over several epochs has the losses of a run in one part."""

    def losses_until(folder: Path, until: int) -> list[float]:
        def train(run: autoshard.Run) -> list[float]:
            torch.manual_seed(0)
            step = make_step()
            dataset = TensorDataset(torch.arange(12.0).view(6, 2).sin())
            loader = autoshard.data.loader(dataset, step, batch_size=2, seed=0)
            batches = (batch for _ in itertools.count() for batch in loader)
            return [float(step(*next(batches))) for _ in run.steps(step, until, data=loader)]

        return autoshard.run(train, checkpoints=autoshard.Checkpoints(folder))

    parts = [losses_until(tmp_path / "parts", until) for until in (2, 3, 8)]
    assert [len(part) for part in parts] == [2, 1, 5]
    assert [*parts[0], *parts[1], *parts[2]] == losses_until(tmp_path / "whole", 8)


def test_what_is_refused(tmp_path: Path) -> None:
    """A wrong `train`, `checkpoints` or `until` is refused by its name and type."""
    checkpoints = autoshard.Checkpoints(tmp_path)
    with pytest.raises(NotAvailableError, match=r"train=3 is a int; pass a function of one argument\."):
        autoshard.run(3, checkpoints=checkpoints)  # type: ignore[arg-type]
    with pytest.raises(
        NotAvailableError, match=r"checkpoints='runs' is a str; pass autoshard\.Checkpoints\(folder\)\."
    ):
        autoshard.run(len, checkpoints="runs")  # type: ignore[arg-type]
    with pytest.raises(NotAvailableError, match=r"until=2\.5: pass the number of steps of the whole run\."):
        autoshard.run(lambda run: run.steps(make_step(), 2.5), checkpoints=checkpoints)  # type: ignore[arg-type]
