"""Every example runs, as a user would run it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_SMALL = ("--steps", "3", "--layers", "1", "--width", "32", "--heads", "4", "--length", "16")
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")


def _run(*arguments: str, folder: Path) -> str:
    """What `python *arguments` prints; a failure shows its whole output."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _example(name: str) -> str:
    return str(ROOT / "examples" / name)


def test_quickstart_equals_one_device(tmp_path: Path) -> None:
    """Both lines show the same loss."""
    losses = re.findall(r"loss (\S+)", _run(_example("quickstart.py"), folder=tmp_path))
    assert len(losses) == 2
    assert float(losses[0]) == pytest.approx(float(losses[1]), rel=1e-5)


def test_quickstart_is_short() -> None:
    """Under 30 lines."""
    assert len(Path(_example("quickstart.py")).read_text().splitlines()) < 30


@pytest.mark.parametrize("launcher", [(), _TORCHRUN], ids=["simulator", "torchrun"])
def test_train_gpt_equals_one_device(launcher: tuple[str, ...], tmp_path: Path) -> None:
    """The loss curve is that of one device, and the plan is written."""
    text = _run(*launcher, _example("train_gpt.py"), *_SMALL, folder=tmp_path)
    difference = re.search(r"Largest difference of the loss curve to one device: (\S+)", text)
    assert difference is not None, text
    assert float(difference[1]) < 1e-4
    assert (tmp_path / "plan.json").exists()


def test_plan_llama_prints_a_plan(tmp_path: Path) -> None:
    """A plan for 64 devices, without any."""
    text = _run(_example("plan_llama.py"), "--layers", "2", folder=tmp_path)
    assert "model.layers.*.mlp.up_proj.weight" in text
    assert "Cost of one step" in text
