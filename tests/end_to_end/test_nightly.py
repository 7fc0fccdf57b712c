"""The nightly run resumes after its finished shards, and writes failures as code."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import strategies as st

from autoshard.testing import programs
from tests import nightly


def test_shards_are_kept_and_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second run skips finished shards and runs only additional shards, until its time is over."""
    drawn = []

    def counted(data: st.DataObject, most_plans: int) -> int:
        drawn.append(data.draw(st.integers()))
        return 1

    monkeypatch.setattr(nightly, "PROPERTIES", {"counted": counted})
    arguments = ["--examples", "3", "--folder", str(tmp_path)]
    assert nightly.main([*arguments, "--shards", "2"]) == 0
    assert len(drawn) == 6
    assert nightly.main([*arguments, "--shards", "2"]) == 0
    assert len(drawn) == 6
    assert nightly.main([*arguments, "--shards", "3"]) == 0
    assert len(drawn) == 9
    assert "9 pairs in 3 of 3 shards equal one device." in capsys.readouterr().out
    assert nightly.main([*arguments, "--shards", "4", "--minutes", "-1"]) == 0
    assert len(drawn) == 9
    assert "9 pairs in 3 of 4 shards" in capsys.readouterr().out


def test_the_smallest_failure_is_kept_as_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest failing program is written to a file of its shard, and the exit status is 1."""

    def fails(data: st.DataObject, most_plans: int) -> int:
        program = data.draw(programs(max_blocks=1))
        assert not list(program.model.parameters()), "a model with parameters"
        return 1

    monkeypatch.setattr(nightly, "PROPERTIES", {"wrong": fails})
    assert nightly.main(["--examples", "20", "--shards", "1", "--folder", str(tmp_path)]) == 1
    text = (tmp_path / "00000 20.txt").read_text()
    assert "class Drawn(nn.Module):" in text
    assert "a model with parameters" in text
