"""A rank that ends or hangs during a save is named on every other rank, and a slow rank is waited for."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from autoshard import Checkpoints, LostRankError
from autoshard.checkpoints import files
from autoshard.checkpoints.manifest import Manifest
from autoshard.checkpoints.ranks import Ranks
from tests.runtime.processes import PRELOADED, held_store, join_ranks

RANKS, TIMEOUT_S, DEADLINE_S = 3, 2.0, 120.0


def work(rank: int, room: str, port: int, doomed: int, kind: int) -> None:
    """A rank that saves twice. The rank `doomed` is slow at first, and gets the signal `kind` in the second save."""
    join_ranks(port, rank, RANKS)
    checkpoints, model = Checkpoints(Path(room, "run"), timeout_s=TIMEOUT_S), nn.Linear(8, 8)
    write = files.Writer.write

    def slow(writer: files.Writer, items: dict) -> files.Written:
        if rank == doomed:
            time.sleep(1.5 * TIMEOUT_S)
        return write(writer, items)

    files.Writer.write = slow  # type: ignore[method-assign]
    checkpoints.save(model, at=1)
    checkpoints.wait()

    def hang(writer: files.Writer, items: dict) -> files.Written:
        if rank == doomed:
            os.kill(os.getpid(), kind)
        return write(writer, items)

    files.Writer.write = hang  # type: ignore[method-assign]
    checkpoints.save(model, at=2)
    try:
        checkpoints.wait()
        said = "no error"
    except LostRankError as error:
        said = str(error)
    Path(room, f"{rank}.txt").write_text(said)
    os._exit(0)


@pytest.mark.parametrize(
    ("doomed", "kind"),
    [(2, signal.SIGSTOP), (0, signal.SIGSTOP), (1, signal.SIGKILL)],
    ids=["one hangs", "the first hangs", "one ends"],
)
def test_it_is_named_on_every_other_rank(doomed: int, kind: int, tmp_path: Path) -> None:
    """The other ranks get an error with the rank's number within the time limit, and the first checkpoint stays
    the latest."""
    store = held_store()
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    signalled = (str(tmp_path), store.port, doomed, int(kind))
    processes = [context.Process(target=work, args=(rank, *signalled)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    others = [rank for rank in range(RANKS) if rank != doomed]
    for rank in others:
        processes[rank].join(DEADLINE_S)
    hanging = [rank for rank in others if processes[rank].is_alive()]
    for process in processes:
        process.kill()
        process.join()
    assert not hanging
    for rank in others:
        text = (tmp_path / f"{rank}.txt").read_text()
        assert text.startswith(f"Ranks [{doomed}] did not come within "), text
        assert f"waited to go on with saving step 2 to {tmp_path / 'run'}" in text
    latest = Checkpoints(tmp_path / "run").latest
    assert latest is not None
    assert latest.name == "step-1"


def work_apart(rank: int, room: str, ports: list[int]) -> None:
    """A rank that uses the same `Checkpoints` object before, within and after two process groups."""
    checkpoints = Checkpoints(Path(room, "run"))
    assert checkpoints.load(nn.Linear(2, 2)) == 0
    for step, port in enumerate(ports, 1):
        join_ranks(port, rank, RANKS - 1)
        checkpoints.save(nn.Linear(2, 2), at=step)
        checkpoints.wait()
        assert checkpoints.latest is not None
        assert (checkpoints.latest.name, Manifest.read(checkpoints.latest).ranks) == (f"step-{step}", RANKS - 1)
        dist.destroy_process_group()
    assert checkpoints.load(nn.Linear(2, 2)) == len(ports)


def test_ranks_are_those_of_the_present_group(tmp_path: Path) -> None:
    """A `Checkpoints` object that was used before, or in an earlier process group, saves with all ranks of the
    present group."""
    context, stores = mp.get_context("forkserver"), [held_store(), held_store()]
    context.set_forkserver_preload(PRELOADED)
    ports = [store.port for store in stores]
    processes = [context.Process(target=work_apart, args=(rank, str(tmp_path), ports)) for rank in range(RANKS - 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(DEADLINE_S)
        process.kill()
    assert [process.exitcode for process in processes] == [0, 0]


def test_one_process_waits_for_nobody() -> None:
    """Without a process group there is one rank and no channel."""
    ranks = Ranks.of(nn.Linear(2, 2))
    assert (ranks.rank, ranks.size, ranks.channel) == (0, 1, None)
