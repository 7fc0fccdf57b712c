"""A run that dies at any file operation of a save continues from a complete checkpoint."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autoshard import Checkpoints
from autoshard.checkpoints import folder as folders
from autoshard.checkpoints.manifest import Summer

EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.scandir", "os.listdir", "shutil.rmtree")


class Crash(BaseException):
    """The simulated end of a process, which no handler catches."""


class Fate:
    """Raises `Crash` at the operation after `left` more, or never if `left` is None."""

    left: int | None = None

    def meet(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise Crash


FATE = Fate()


@contextmanager
def ending_after(count: int) -> Iterator[None]:
    FATE.left = count
    try:
        yield
    finally:
        FATE.left = None


@pytest.fixture
def _counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count file operations: audit events of Python, writes, and calls of fsync."""
    add, fsync = Summer.add, os.fsync
    monkeypatch.setattr(Summer, "add", lambda summer, data: FATE.meet() or add(summer, data))
    monkeypatch.setattr(os, "fsync", lambda descriptor: FATE.meet() or fsync(descriptor))
    sys.addaudithook(lambda event, _: FATE.meet() if event in EVENTS else None)


class Filled(nn.Module):
    """A module whose parameters and optimizer state have the number of steps as every element."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.table = nn.Parameter(torch.zeros(7, 5)), nn.Parameter(torch.zeros(300, 200))
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    @torch.no_grad()
    def fill(self, step: int) -> None:
        for parameter in self.parameters():
            parameter.fill_(step)
            self.optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, step)

    def values(self) -> set[Any]:
        held = [*self.parameters(), *(state["momentum_buffer"] for state in self.optimizer.state.values())]
        return {value for item in held for value in item.unique().tolist()}


def loaded(folder: Path) -> int:
    """The step of the latest checkpoint, after a load and a check that its values are of this step."""
    model = Filled()
    step = Checkpoints(folder).load(model, optimizer=model.optimizer)
    assert model.values() == {step}
    return step


def check_each(folder: Path, alone: Path) -> None:
    """Check that each checkpoint with a complete name loads."""
    alone.mkdir()
    for step, path in folders.complete(folder).items():
        (alone / f"step-{step}").symlink_to(path)
        assert loaded(alone) == step
        (alone / f"step-{step}").unlink()


@pytest.mark.usefixtures("_counted")
def test_a_save_may_end_at_any_operation(tmp_path: Path) -> None:
    """Two saves, of which one is kept, crash at each of their file operations, and all complete checkpoints load."""
    folder, latest, ends = tmp_path / "run", 0, 0
    while True:
        model, checkpoints = Filled(), Checkpoints(folder, keep=1, asynchronous=False)
        try:
            with ending_after(ends):
                for step in (latest + 1, latest + 2):
                    model.fill(step)
                    checkpoints.save(model, at=step, optimizer=model.optimizer)
            break
        except Crash:
            ends += 1
        found = loaded(folder)
        assert latest <= found <= latest + 2
        check_each(folder, tmp_path / f"alone {ends}")
        latest = found
    assert ends > 20
    assert loaded(folder) == latest + 2
    assert [path.name for path in folder.iterdir()] == [f"step-{latest + 2}"]
