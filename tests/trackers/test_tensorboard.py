"""TensorBoard reads the files of the writer `TensorBoard`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from autoshard import NotAvailableError
from autoshard.trackers import TensorBoard


def test_tensorboard_reads_the_scalars(tmp_path: Path) -> None:
    """TensorBoard reads each number with its step, and there is no folder before the first step."""
    writer = TensorBoard(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    for number in (3, 4):
        writer.log(number, {"loss": number / 2, "lr": 0.25})
        assert (tmp_path / "run").exists()
    writer.close()
    writer.close()
    found = EventAccumulator(str(tmp_path / "run")).Reload()
    assert found.Tags()["scalars"] == ["loss", "lr"]
    assert [(item.step, item.value) for item in found.Scalars("loss")] == [(3, 1.5), (4, 2.0)]


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package tensorboard, the first step is refused with the command that installs it."""
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.summary_pb2", None)
    with pytest.raises(NotAvailableError, match="pip install tensorboard"):
        TensorBoard(tmp_path / "run").log(1, {"loss": 1.0})
