"""`autoshard calibrate` measures local ranks, writes a cluster, and refuses impossible options."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autoshard.cli.app import app
from autoshard.cli.places import parse_cluster
from autoshard.errors import MeshError, NotAvailableError


@pytest.mark.slow
def test_two_local_ranks_are_measured_and_written(tmp_path: Path) -> None:
    """Two measured ranks give a file that `plan` reads as a cluster of two devices, and the printed numbers
    compare fit and measurement."""
    path = tmp_path / "mine.toml"
    result = CliRunner().invoke(app, ["calibrate", "--out", str(path), "--ranks", "2", "--budget-s", "1", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert {"launch", "copy", "all_reduce.2.8388608"} <= found["measured_s"].keys()
    assert found["predicted_over_measured"].keys() <= found["measured_s"].keys()
    cluster = parse_cluster(str(path))
    assert cluster.size == 2
    assert cluster.device.memory_bandwidth_bytes_per_s > 0


def test_ranks_must_be_positive(tmp_path: Path) -> None:
    """`--ranks 0` is refused."""
    with pytest.raises(MeshError, match="--ranks 0 must be at least 1"):
        CliRunner().invoke(
            app, ["calibrate", "--out", str(tmp_path / "mine.toml"), "--ranks", "0"], catch_exceptions=False
        )


@pytest.mark.parametrize("budget", ["0", "-1", "nan", "inf"])
def test_measuring_takes_time(tmp_path: Path, budget: str) -> None:
    """A budget that is no positive number of seconds is refused."""
    with pytest.raises(NotAvailableError, match=r"--budget-s (0|-1|nan|inf) must be a number of seconds above 0"):
        CliRunner().invoke(
            app, ["calibrate", "--out", str(tmp_path / "mine.toml"), "--budget-s", budget], catch_exceptions=False
        )
