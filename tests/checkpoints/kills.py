"""Runs that are killed at drawn moments of saving, renaming, deleting and loading, and continue from the remains.

Usage: python -m tests.checkpoints.kills [--count 60] [--seed 0] [--ranks 2 4]

In a trial, some ranks load the latest checkpoint, check it, and save more checkpoints, of which two are kept. A drawn
rank counts its operations in the folder (files opened, written, synced, renamed, removed). It kills itself by SIGKILL
at a drawn count. The other ranks are killed a drawn moment later, as by a launcher. Then another process loads the
latest complete checkpoint, and checks that it is not older than before the run. Every folder with a complete name must
load too, and contain the state of one step.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from autoshard import Checkpoints, LostRankError
from autoshard.checkpoints import folder as folders
from autoshard.checkpoints.files import _SummedFile
from tests.runtime.processes import PRELOADED

SAVES, KEPT, DEADLINE_S = 3, 2, 60.0
EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.scandir", "os.listdir", "shutil.rmtree")


class Filled(nn.Module):
    """Every element of the state is the number of steps done."""

    def __init__(self, *, by_shards: bool) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if by_shards else None

        def made(*shape: int) -> nn.Parameter:
            whole = torch.zeros(shape)
            return nn.Parameter(
                whole if mesh is None else distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
            )

        self.weight, self.bias, self.table = made(7, 5), made(3), made(300, 200)
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    @torch.no_grad()
    def fill(self, step: int) -> None:
        for parameter in self.parameters():
            parameter.fill_(step)
            self.optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, step)

    def steps_in_it(self) -> set[float]:
        held = [parameter.detach() for parameter in self.parameters()]
        held += [state["momentum_buffer"] for state in self.optimizer.state.values()]
        local = [getattr(item, "_local_tensor", item) for item in held]
        return {float(value) for item in local for value in item.unique()}


def load(folder: Path, model: Filled) -> int:
    """Load the latest checkpoint, and check that its values are of its step."""
    step = Checkpoints(folder).load(model, optimizer=model.optimizer)
    assert model.steps_in_it() <= {float(step)}, (step, model.steps_in_it())
    return step


@dataclass
class Fate:
    """Counts this process's operations in a folder, and kills it at the nth operation of a kind; 0: never."""

    folder: Path
    kind: str
    nth: int
    told: Path
    kinds: list[str] = field(default_factory=list)

    def watch(self) -> None:
        write, fsync = _SummedFile.write, os.fsync

        def counted_write(file: _SummedFile, data: Any) -> int:
            self.meet("write", file._path)
            return write(file, data)

        def counted_fsync(descriptor: int) -> None:
            self.meet("fsync", "")
            fsync(descriptor)

        _SummedFile.write, os.fsync = counted_write, counted_fsync
        sys.addaudithook(lambda event, arguments: self._see(event, arguments))

    def _see(self, event: str, arguments: Sequence[Any]) -> None:
        if event in EVENTS and str(self.folder) in str(arguments[0]):
            self.meet(event, " ".join(str(item) for item in arguments[:2]))

    def meet(self, event: str, where: object) -> None:
        self.kinds.append(kind_of(event, str(where)))
        if self.kinds[-1] == self.kind and self.kinds.count(self.kind) == self.nth:
            descriptor = os.open(self.told, os.O_WRONLY | os.O_CREAT)
            os.write(descriptor, self.kinds[-1].encode())
            os.kill(os.getpid(), signal.SIGKILL)


def run(rank: int, ranks: int, store: str, folder: Path, doomed: int, kind: str, nth: int, told: Path) -> None:
    """One rank of a trial."""
    os.environ.update(GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    model, checkpoints = Filled(by_shards=True), Checkpoints(folder, keep=KEPT)
    fate = Fate(folder, kind, nth if rank == doomed else 0, told)
    fate.watch()
    try:
        start = load(folder, model)
        for step in range(start + 1, start + 1 + SAVES):
            model.fill(step)
            checkpoints.save(model, at=step, optimizer=model.optimizer)
        checkpoints.wait()
    except LostRankError:
        return  # as a launcher ends it
    told.with_suffix(f".{rank}").write_text("\n".join(fate.kinds))
    dist.destroy_process_group()


def one_trial(
    folder: Path, ranks: int, doomed: int, kind: str, nth: int, delay_s: float
) -> tuple[str, list[list[str]]]:
    """The operation at which the doomed rank was killed, "" if it was not, and the operations of ranks that ended."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as name:
        room = Path(name)
        arguments = (ranks, str(room / "store"), folder, doomed, kind, nth, room / "told")
        processes = [context.Process(target=run, args=(rank, *arguments), daemon=True) for rank in range(ranks)]
        for process in processes:
            process.start()
        deadline = time.monotonic() + DEADLINE_S
        while all(process.is_alive() for process in processes) and time.monotonic() < deadline:
            time.sleep(0.005)
        if nth:
            time.sleep(delay_s)
        for process in processes:
            if not nth:
                process.join(DEADLINE_S)
            process.kill()
            process.join()
        told, kinds = room / "told", [room / f"told.{rank}" for rank in range(ranks)]
        return told.read_text() if told.exists() else "", [path.read_text().split() for path in kinds if path.exists()]


def check(folder: Path, before: int) -> int:
    """The latest complete checkpoint; every checkpoint with a complete name loads."""
    after = load(folder, Filled(by_shards=False))
    assert after >= before, (before, after)
    for path in folders.complete(folder).values():
        with tempfile.TemporaryDirectory() as alone:
            step = int(path.name.split("-")[1].split(".")[0])
            Path(alone, f"step-{step}").symlink_to(path)
            assert load(Path(alone), Filled(by_shards=False)) == step
    return after


def campaign(count: int, seed: int, sizes: Sequence[int], folder: Path) -> Counter[str]:
    """Draw and judge `count` kills, equally many of each kind; return where they struck."""
    draw, struck = random.Random(seed), Counter[str]()
    done = {ranks: one_trial(folder, ranks, 0, "", 0, 0)[1] for ranks in sizes}
    assert all(len(kinds) == ranks for ranks, kinds in done.items()), "a run that nobody kills ends"
    latest = check(folder, SAVES * len(done))
    while struck.total() < count:
        ranks, doomed = draw.choice(sizes), draw.choice((0, 0, 1))
        kinds = done[ranks][doomed]
        kind = draw.choice(sorted({*kinds}))
        nth = draw.randint(1, kinds.count(kind))
        killed, _ = one_trial(folder, ranks, doomed, kind, nth, draw.choice((0.0, 0.0, 0.02, 0.2)))
        latest = check(folder, latest)
        if killed:
            struck[killed] += 1
    return struck


def kind_of(event: str, where: str) -> str:
    """Name the activity of a run at an event."""
    if ".deleted" in where and event != "os.rename":
        return "deleting"
    if event == "os.rename":
        return "renaming"
    return "saving" if ".writing" in where or event == "fsync" else "loading"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        struck = campaign(options.count, options.seed, options.ranks, Path(folder))
    told = ", ".join(f"{number} {kind}" for kind, number in struck.most_common())
    sys.stdout.write(f"{struck.total()} kills: {told}; the latest complete checkpoint loaded each time\n")


if __name__ == "__main__":
    main()
