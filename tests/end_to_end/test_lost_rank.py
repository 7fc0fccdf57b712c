"""A killed or stopped rank ends every other rank with one clear error, never a hang."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

import autoshard
from autoshard import LostRankError, Mesh, P
from autoshard.runtime.agreement.control_group import ControlGroup
from autoshard.runtime.program_run import StageRun
from tests.models import Chain
from tests.runtime.one_layer import OneLayer
from tests.runtime.processes import PRELOADED, held_store, join_ranks

RANKS = 3
DEADLINE_S = 120.0


def kill_this_rank(*_: object) -> NoReturn:
    """End this rank as the kernel does without memory, with no message and no orderly close."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a killed process does not go on")


def error_of(run: Callable[[], Any]) -> str:
    """Return the class and message of the error that a call raises, or "no error"."""
    try:
        run()
    except Exception as error:  # noqa: BLE001  (which one it is, is asked)
        return f"{type(error).__name__}: {error}"
    return "no error"


def work(rank: int, folder: str, port: int) -> None:
    """Train on three ranks; rank 2 dies in the second step, and rank 1 before an agreement with rank 0."""
    join_ranks(port, rank, RANKS)
    survivors = ControlGroup([0, 1], timeout_s=2.0) if rank < 2 else None
    model, batch = OneLayer(), torch.linspace(-1, 1, 108).view(18, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    asked = {
        "optimizer": optimizer,
        "micro_batches": 3,
        "constraints": {"input:*": P("data")},
        "options": autoshard.Options(check="off"),
    }
    step = autoshard.compile(model, Mesh({"data": RANKS}), **asked)
    step(batch)
    if rank == 2:
        StageRun.add = kill_this_rank  # type: ignore[method-assign]
    Path(folder, f"step.{rank}").write_text(error_of(lambda: step(batch)))
    if rank == 1:
        kill_this_rank()
    assert survivors is not None, "the last rank died before"
    error = error_of(lambda: survivors.agree(lambda: {"compiled program": "mine"}))
    Path(folder, f"agreement.{rank}").write_text(error)
    os._exit(0)


def work_in_stages(rank: int, folder: str, port: int) -> None:
    """Train in three pipeline stages; the last stage dies in the second step."""
    join_ranks(port, rank, RANKS)
    model, batch = Chain(6, RANKS), torch.linspace(-1, 1, 108).view(18, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = autoshard.compile(
        model, Mesh({"pipeline": RANKS}), optimizer=optimizer, micro_batches=3, options=autoshard.Options(check="off")
    )
    step(batch)
    if rank == 2:
        StageRun.add = kill_this_rank  # type: ignore[method-assign]
    Path(folder, f"stages.{rank}").write_text(error_of(lambda: step(batch)))
    os._exit(0)


def work_with_one_that_stops(rank: int, folder: str, port: int) -> None:
    """Compile on three ranks, of which rank 2 is stopped before, and write each error and waiting time."""
    join_ranks(port, rank, RANKS)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    start = time.monotonic()
    error = error_of(
        lambda: autoshard.compile(OneLayer(), Mesh({"data": RANKS}), options=autoshard.Options(timeout_s=1.0))
    )
    Path(folder, f"compile.{rank}").write_text(f"{time.monotonic() - start} {error}")
    os._exit(0)


def stop_this_rank(*_: object) -> NoReturn:
    """Stop this rank as a debugger or a hanging device does, so that it neither ends nor answers."""
    os.kill(os.getpid(), signal.SIGSTOP)
    raise AssertionError("nobody lets a stopped process go on")


def work_on_two_axes(rank: int, folder: str, port: int) -> None:
    """Train on a mesh of two axes; the last rank is stopped in the second step."""
    join_ranks(port, rank, 4)
    model, batch = cast(nn.Module, OneLayer()), torch.linspace(-1, 1, 72).view(12, 6)
    names = Path(folder).name.split()
    if "pipeline" in names:
        model = Chain(6, RANKS)
    optimizer, mesh = torch.optim.SGD(model.parameters(), lr=0.1), Mesh(dict.fromkeys(names, 2))
    asked: dict[str, Any] = {"optimizer": optimizer, "micro_batches": 2}
    asked["options"] = autoshard.Options(check="off", timeout_s=5.0)
    if "model" in names:
        asked["constraints"] = {"input:*": P("data"), "layer.weight": P(None, "model")}
    step = autoshard.compile(model, mesh, **asked)
    step(batch)
    if rank == 3:
        StageRun.add = stop_this_rank  # type: ignore[method-assign]
    start = time.monotonic()
    error = error_of(lambda: [step(batch) for _ in range(3)])  # a rank that talks to others alone ends the step
    Path(folder, f"{rank}").write_text(f"{time.monotonic() - start} {error}")
    os._exit(0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which each rank of `work` wrote its errors."""
    path = tmp_path_factory.mktemp("errors")
    assert run(work, path, RANKS) == []
    return path


def run(what: Callable[[int, str, int], None], path: Path, ending: int, ranks: int = RANKS) -> list[int]:
    """Run processes and wait for the first `ending` ones; return the ranks among these that did not end in time."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    store = held_store()
    processes = [context.Process(target=what, args=(rank, str(path), store.port)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes[:ending]:
        process.join(DEADLINE_S)
    hanging = [rank for rank, process in enumerate(processes[:ending]) if process.is_alive()]
    for process in processes:
        process.kill()
    return hanging


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_amid_a_step(folder: Path, rank: int) -> None:
    """If a rank dies in a step, each surviving rank raises `LostRankError`."""
    text = (folder / f"step.{rank}").read_text()
    assert text.startswith(f"{LostRankError.__name__}: Rank {rank} was communicating with other ranks, and one of")


def test_a_rank_that_dies_before_ranks_agree(folder: Path) -> None:
    """If a rank dies before an agreement, the waiting rank names it after the time limit."""
    text = (folder / "agreement.0").read_text()
    assert text.startswith(f"{LostRankError.__name__}: Ranks [1] did not come within 2 s")


def test_the_rank_that_died_said_nothing(folder: Path) -> None:
    """Each killed rank died at its intended place, before it wrote an error."""
    assert not (folder / "step.2").exists()
    assert not (folder / "agreement.1").exists()


def test_a_stage_that_dies_ends_all_stages(tmp_path: Path) -> None:
    """If the last pipeline stage dies, all other stages raise `LostRankError`."""
    assert run(work_in_stages, tmp_path, RANKS) == []
    assert not (tmp_path / "stages.2").exists()
    for rank in range(RANKS - 1):
        text = (tmp_path / f"stages.{rank}").read_text()
        assert text.startswith(f"{LostRankError.__name__}: Rank {rank} was communicating with other ranks, and one of")


def test_a_rank_that_is_stopped_before_it_compiles(tmp_path: Path) -> None:
    """If a rank is stopped before it compiles, each other rank names it within ten seconds."""
    assert run(work_with_one_that_stops, tmp_path, RANKS - 1) == []
    for rank in range(RANKS - 1):
        waited_s, error = (tmp_path / f"compile.{rank}").read_text().split(" ", 1)
        assert error.startswith(f"{LostRankError.__name__}: Ranks [2] did not come within 1 s")
        assert "while ranks [0, 1] waited to make Mesh(data=3)" in error
        assert float(waited_s) < 10


@pytest.mark.sample(1)
@pytest.mark.parametrize("axes", ["data model", "pipeline data"])
def test_a_rank_that_is_stopped_amid_a_step(tmp_path: Path, axes: str) -> None:
    """If a rank is stopped in a step, each other rank raises within a minute, whichever axis it waits on."""
    path = tmp_path / axes
    path.mkdir()
    assert run(work_on_two_axes, path, 3, 4) == []
    for rank in range(3):
        waited_s, error = (path / f"{rank}").read_text().split(" ", 1)
        assert error.startswith(f"{LostRankError.__name__}: Rank {rank} was communicating with other ranks, and one of")
        assert float(waited_s) < 60
        assert "3] gave no sign." in error  # rank 2 may have other partners, and still wait
        assert re.search(r"It was (waiting for the|in the) [a-z-]+ over|It was receiving|It was waiting until", error)
