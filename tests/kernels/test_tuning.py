"""Tuning of block sizes is off unless asked for, is kept for other processes, and does not change results."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import autoshard
from autoshard import Mesh
from autoshard.errors import KernelError
from autoshard.kernels.triton_norms import rms_norm
from autoshard.kernels.tuning_store import Store
from autoshard.kernels.tuning_switch import active_tuning, folder_identity
from autoshard.runtime.agreement.control_group import PieceFact
from autoshard.runtime.engine import SimulatorEngine
from tests.kernels.calls import CALLS, run
from tests.kernels.fused import DEVICE, draw

ROOT = Path(__file__).parents[2]
EPS = 1e-5


def norm(x: Tensor) -> Tensor:
    """The RMS norm of rows, by the kernel that tests tune."""
    return rms_norm(x, [x.shape[-1]], None, EPS)[0]


@pytest.fixture(autouse=True)
def _off_afterwards() -> Iterator[None]:
    yield
    autoshard.tune_kernels(False)


class CountingTimer:
    """A timer that runs the timed function `runs` times, and reports candidate number `best` as the fastest."""

    def __init__(self, best: int = 2, runs: int = 1) -> None:
        self.best, self.runs, self.calls = best, runs, 0

    def __call__(self, function: Callable[[], object], quantiles: Sequence[float]) -> list[float]:
        for _ in range(self.runs):
            function()
        self.calls += 1
        return [abs(self.calls - 1 - self.best) + 1.0] * len(quantiles)


def _choices(folder: Path) -> dict[str, list[str]]:
    """The choices in a folder, by kernel."""
    found: dict[str, list[str]] = {}
    for path in sorted(folder.glob("*.json")):
        entry = json.loads(path.read_text())
        found.setdefault(entry["key"]["kernel"], []).append(entry["choice"])
    return found


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", sorted(CALLS))
def test_timing_leaves_no_trace(name: str, tmp_path: Path) -> None:
    """Kernels run many times while they are measured, and results do not change, also where a kernel
    writes in place."""
    expected = run(name, 5, 20)
    timer = CountingTimer(best=1)
    autoshard.tune_kernels(folder=tmp_path, timer=timer)
    found = run(name, 5, 20)
    assert timer.calls > 1
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_what_is_measured_is_kept(tmp_path: Path) -> None:
    """The fastest candidate is stored. Sizes of one class share a measurement, and a new object for the folder
    measures nothing again."""
    timer = CountingTimer(best=2)
    autoshard.tune_kernels(folder=tmp_path, timer=timer)
    norm(draw(33, 100))
    measured = timer.calls
    assert _choices(tmp_path) == {"norm_forward_kernel": ["BLOCK_R 8, 4 warps"]}
    norm(draw(60, 100))  # the same powers of two
    assert timer.calls == measured
    norm(draw(65, 100))
    assert timer.calls == 2 * measured
    norm(draw(33, 100).half())
    assert timer.calls == 3 * measured
    autoshard.tune_kernels(folder=tmp_path, timer=timer)
    norm(draw(40, 100))
    assert timer.calls == 3 * measured


_SECOND = """
import sys
import autoshard
from autoshard.kernels.triton_norms import rms_norm
from tests.kernels.fused import draw

def timer(function, quantiles):
    raise AssertionError("measured again")

autoshard.tune_kernels(folder=sys.argv[1], timer=timer)
print(rms_norm(draw(33, 100), [100], None, 0.0)[0].square().mean().item())
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the second process interprets")
def test_a_second_process_measures_nothing(tmp_path: Path) -> None:
    """The second process reads the first one's measurements."""
    autoshard.tune_kernels(folder=tmp_path, timer=CountingTimer())
    norm(draw(33, 100))
    made = subprocess.run([sys.executable, "-c", _SECOND, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    assert float(made.stdout) == pytest.approx(1, rel=1e-4)


def test_a_damaged_entry_is_measured_again(tmp_path: Path) -> None:
    """A truncated file counts as missing, so that the kernel is measured again and the file is written anew."""
    timer = CountingTimer()
    autoshard.tune_kernels(folder=tmp_path, timer=timer)
    norm(draw(33, 100))
    (path,), measured = tmp_path.glob("*.json"), timer.calls
    path.write_text(path.read_text()[:40])
    autoshard.tune_kernels(folder=tmp_path, timer=timer)
    norm(draw(33, 100))
    assert timer.calls == 2 * measured
    assert json.loads(path.read_text())["key"]["kernel"] == "norm_forward_kernel"


def test_a_full_disk_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk gives one warning with the folder's name. Kernels then run with the heuristic's choice, and nothing
    more is measured."""

    def refuse(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    timer = CountingTimer()
    autoshard.tune_kernels(folder=tmp_path, timer=timer)
    monkeypatch.setattr(Store, "publish", refuse)
    with caplog.at_level(logging.WARNING, "autoshard"):
        x = draw(33, 100)
        found = norm(x)
        measured = timer.calls
        norm(draw(70, 300))
    torch.testing.assert_close(found, F.rms_norm(x, x.shape[-1:], eps=EPS))
    assert timer.calls == measured
    (record,) = caplog.records
    assert str(tmp_path) in record.getMessage()
    assert "No space left on device" in record.getMessage()


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")
def test_the_interpreter_is_not_timed(tmp_path: Path) -> None:
    """Without a user's timer, an interpreted kernel runs unchanged, and nothing is written."""
    autoshard.tune_kernels(folder=tmp_path / "tuned")
    x = draw(3, 10)
    torch.testing.assert_close(norm(x), F.rms_norm(x, x.shape[-1:], eps=EPS))
    assert not (tmp_path / "tuned").exists()


def test_large_copies_are_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured, and the heuristic's choice stays, if a tensor written in place is too large to be copied."""
    monkeypatch.setattr("autoshard.kernels.tuning._MAX_COPIED_BYTES", 10)
    timer = CountingTimer()
    autoshard.tune_kernels(folder=tmp_path, timer=timer)
    run("linear_cross_entropy", 5, 20)
    assert timer.calls == 0


def test_the_variable_switches_it_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """AUTOSHARD_TUNE=1 uses the user's cache, 0 means off, another value is the folder, and `tune_kernels` takes
    precedence."""
    monkeypatch.setattr("autoshard.kernels.tuning_switch._SET", [])
    assert active_tuning() is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for value, folder in (("1", tmp_path / "autoshard" / "tuned"), (str(tmp_path / "mine"), tmp_path / "mine")):
        monkeypatch.setenv("AUTOSHARD_TUNE", value)
        tuning = active_tuning()
        assert tuning is not None
        assert tuning.store.folder == folder
    monkeypatch.setenv("AUTOSHARD_TUNE", "0")
    assert active_tuning() is None
    monkeypatch.setenv("AUTOSHARD_TUNE", "1")
    autoshard.tune_kernels(False)
    assert active_tuning() is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")
def test_ranks_compare_their_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a program with kernels runs, each rank tells the other ranks the identity of its folder of measurements,
    or "none"."""
    told: dict[str | PieceFact, str] = {}
    monkeypatch.setattr(SimulatorEngine, "agree", lambda engine, facts: told.update(facts()))
    model, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
    autoshard.compile(model, Mesh({"data": 2}), example_inputs=(x,), backend="triton")
    (name,) = (name for name in told if "AUTOSHARD_TUNE" in str(name))
    assert told[name] == folder_identity() == "none"
    autoshard.tune_kernels(folder=tmp_path)
    autoshard.compile(model, Mesh({"data": 2}), example_inputs=(x,), backend="triton")
    assert told[name] == folder_identity()
    assert str(tmp_path) in told[name]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """The error names the folder, and the variable AUTOSHARD_TUNE."""
    (tmp_path / "file").write_text("")
    autoshard.tune_kernels(folder=tmp_path / "file")
    with pytest.raises(KernelError, match=r"cannot be kept in .*file.*AUTOSHARD_TUNE"):
        folder_identity()


@pytest.mark.gpu
def test_a_gpu_measures(tmp_path: Path) -> None:
    """On a GPU without a timer of the caller, `triton.testing.do_bench` measures, and the choice is stored."""
    autoshard.tune_kernels(folder=tmp_path)
    x = torch.randn(1000, 4096, device=DEVICE)
    torch.testing.assert_close(norm(x), F.rms_norm(x, x.shape[-1:], eps=EPS))
    assert list(_choices(tmp_path)) == ["norm_forward_kernel"]
