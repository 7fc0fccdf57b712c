"""Saving beside training, and models whose weights have no values yet."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard import CheckpointError, Checkpoints, Mesh, TraceError
from autoshard.checkpoints.files import Writer, Written
from autoshard.checkpoints.ranks import Ranks
from autoshard.checkpoints.snapshot import take
from autoshard.checkpoints.state import TrainingState
from tests.checkpoints.runs import PAIR, Run, assert_same, batch, net


def test_save_returns_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`save` returns while the disk blocks, and the checkpoint has the values of its step although training goes on."""
    goes_on, write = threading.Event(), Writer.write

    def write_late(writer: Writer, items: Any) -> Written:
        assert goes_on.wait(60)
        return write(writer, items)

    monkeypatch.setattr(Writer, "write", write_late)
    run, checkpoints = Run("traced", PAIR, {}), Checkpoints(tmp_path)
    run.train(0, 2)
    values = run.values()
    checkpoints.save(run.step, at=2, schedule=run.schedule)
    run.train(2, 4)
    assert checkpoints.latest is None
    goes_on.set()
    checkpoints.wait()
    assert checkpoints.load(run.step, schedule=run.schedule) == 2
    assert_same(run.values(), values)


def test_one_is_written_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save begins to write after the previous one has ended, and `keep` checkpoints stay."""
    seen, write = [], Writer.write

    def write_and_tell(writer: Writer, items: Any) -> Written:
        seen.append("begins")
        written = write(writer, items)
        seen.append("ends")
        return written

    monkeypatch.setattr(Writer, "write", write_and_tell)
    model, checkpoints = nn.Linear(300, 300), Checkpoints(tmp_path, keep=2)
    for step in range(3):
        checkpoints.save(model, at=step)
    checkpoints.wait()
    assert seen == ["begins", "ends"] * 3
    assert sorted(item.name for item in tmp_path.iterdir()) == ["step-1", "step-2"]


def test_what_is_copied() -> None:
    """An asynchronous save copies a tied weight once, and a synchronous save copies nothing."""
    model = net(0)
    (part,) = take(TrainingState(model, {}).parts(0)[:1], Ranks(), copies=True)
    tied = [part.items[f"model.{name}.weight"].value for name in ("first", "third")]
    assert tied[0] is tied[1]
    assert isinstance(tied[0], torch.Tensor)
    assert tied[0].data_ptr() != model.first.weight.data_ptr()
    (part,) = take(TrainingState(model, {}).parts(0)[:1], Ranks(), copies=False)
    live = part.items["model.first.weight"].value
    assert isinstance(live, torch.Tensor)
    assert live.data_ptr() == model.first.weight.data_ptr()


def test_without_a_copy_it_is_complete_at_once(tmp_path: Path) -> None:
    """A synchronous checkpoint is complete at once, and raises its errors at once."""
    checkpoints = Checkpoints(tmp_path / "runs", asynchronous=False)
    checkpoints.save(nn.Linear(2, 2), at=7)
    assert checkpoints.latest == tmp_path / "runs" / "step-7"
    with pytest.raises(CheckpointError, match="holds a checkpoint of step 7, which is after at=3"):
        checkpoints.save(nn.Linear(2, 2), at=3)


def meta_net() -> nn.Module:
    with torch.device("meta"):
        return net(0)


def test_a_model_from_meta(tmp_path: Path) -> None:
    """A model from the meta device loads once it is compiled, and is not saved before it has values."""
    saved, checkpoints = net(0), Checkpoints(tmp_path, asynchronous=False)
    checkpoints.save(saved, at=1)
    mesh, inputs = Mesh({"data": 2}), (batch(0)[0],)
    with pytest.raises(CheckpointError, match="example_inputs="):
        checkpoints.load(autoshard.compile(meta_net(), mesh))
    placed = autoshard.compile(meta_net(), mesh, example_inputs=inputs)
    with pytest.raises(TraceError, match="load_weights"):
        checkpoints.save(placed, at=2)
    assert checkpoints.load(placed) == 1
    found = {name: item for name, item in placed.state_dict().items() if name != "_extra_state"}
    assert_same(found, dict(saved.state_dict()))
    placed(*inputs)
    checkpoints.save(placed, at=2)


def test_a_plain_module_on_meta_is_refused(tmp_path: Path) -> None:
    """A plain module on the meta device is neither saved nor loaded, and the error names a tensor."""
    checkpoints = Checkpoints(tmp_path, asynchronous=False)
    with pytest.raises(CheckpointError, match=r"'model.scale' is on the meta device"):
        checkpoints.save(meta_net(), at=1)
    checkpoints.save(net(0), at=1)
    with pytest.raises(CheckpointError, match=r"'model.scale' is on the meta device"):
        checkpoints.load(meta_net())
