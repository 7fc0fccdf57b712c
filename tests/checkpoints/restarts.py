"""Runs under `torchrun --max-restarts` whose ranks are killed at drawn moments, and which continue by themselves.

Usage: python -m tests.checkpoints.restarts [--count 20] [--seed 0]

A trial starts two ranks, which train and save after every step. A drawn rank kills itself by SIGKILL a drawn time after
its imports: while ranks meet, compile, load, train or save. In half of the trials, a rank of the first restart does so
too. In a third of them, one rank of a restart starts later than the other. The launcher runs without help. The final
result must equal that of a run without kills, bit by bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

import autoshard

STEPS, DEADLINE_S = 12, 200.0


class Model(torch.nn.Module):
    """Two layers with dropout, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.nn.functional.dropout(self.first(x).tanh(), 0.1, self.training)).square().mean()


def train(folder: str) -> str:
    """A user's script, which writes the loss and the sum of the weights with all their digits."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = autoshard.compile(
        model, autoshard.Mesh({"data": 2}), optimizer=optimizer, example_inputs=(torch.ones(8, 8),)
    )
    checkpoints = autoshard.Checkpoints(folder)
    done, loss = checkpoints.load(step), torch.tensor(float("nan"))
    while done < STEPS:
        done += 1
        loss = step(torch.randn(8, 8, generator=torch.Generator().manual_seed(done)))
        checkpoints.save(step, at=done)
        time.sleep(0.02)
    checkpoints.wait()
    weights = [parameter.full_tensor().double().sum() for parameter in step.sharded.parameters()]
    return f"{loss.item().hex()} {torch.stack(weights).sum().item().hex()}"


@dataclass(frozen=True)
class Fate:
    """Events of a trial's ranks.

    Args:
        kills: for each attempt, the rank that is killed, and after how many seconds.
        late: the rank that comes later to restarts, and by how many seconds.
    """

    kills: list[tuple[int, float]] = field(default_factory=list)
    late: tuple[int, float] = (0, 0.0)

    def meet(self, attempt: int, rank: int) -> None:
        """Begin an attempt."""
        if attempt and rank == self.late[0]:
            time.sleep(self.late[1])
        if attempt < len(self.kills) and self.kills[attempt][0] == rank:
            timer = threading.Timer(self.kills[attempt][1], lambda: os.kill(os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()


def run(folder: Path, fate: Fate) -> tuple[str, float, int]:
    """The result of one trial by the launcher, the seconds of its last attempt, and the number of restarts."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--max-restarts", "3", "--nproc-per-node", "2"]
    told = ["--folder", str(folder), "--fate", json.dumps(asdict(fate))]
    command = [sys.executable, *launcher, "-m", "tests.checkpoints.restarts", *told]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=environment, check=False)
    assert done.returncode == 0, f"{fate}: {done.stdout}{done.stderr[-5000:]}"
    restarts = max(int(path.name) for path in (folder / "attempts").iterdir())
    return (folder / "result").read_text(), float((folder / "seconds").read_text()), restarts


def work(folder: Path, fate: Fate) -> None:
    """One rank of a trial."""
    torch.set_num_threads(1)
    attempt, rank, start = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"]), time.monotonic()
    (folder / "attempts" / str(attempt)).mkdir(parents=True, exist_ok=True)
    fate.meet(attempt, rank)
    result = train(str(folder / "saved"))
    if rank == 0:
        (folder / "result").write_text(result)
        (folder / "seconds").write_text(str(time.monotonic() - start))


def campaign(count: int, seed: int, folder: Path) -> int:
    """Draw and judge `count` kills; return the number of trials."""
    draw, kills, trials = random.Random(seed), 0, 0
    expected, seconds, _ = run(folder / "whole", Fate())
    while kills < count:
        drawn = draw.choice((1, 2))
        fate = Fate(
            [(draw.randrange(2), draw.uniform(0.0, 0.9 * seconds)) for _ in range(min(count - kills, drawn))],
            (draw.randrange(2), draw.choice((0.0, 0.0, 1.0))),
        )
        result, _, struck = run(folder / str(trials), fate)
        assert result == expected, f"{fate}: {result} for {expected}"
        kills, trials = kills + struck, trials + 1
    return trials


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--fate", type=lambda text: Fate(**json.loads(text)))
    options = parser.parse_args()
    if options.folder is not None:
        work(options.folder, options.fate)
        return
    with tempfile.TemporaryDirectory() as folder:
        trials = campaign(options.count, options.seed, Path(folder))
    sys.stdout.write(f"{options.count} kills in {trials} runs, each of which went on to the same bits\n")


if __name__ == "__main__":
    main()
