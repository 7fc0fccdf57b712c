"""Damaged files are refused by the names of file and tensor. A full disk raises one error, and training goes on."""

from __future__ import annotations

import errno
import io
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autoshard import CheckpointError, Checkpoints, JoinedOptimizer
from autoshard.checkpoints import manifest
from tests.runtime.processes import report, run_checks

DRAWN = 60


def model(width: int = 40, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, 50), nn.BatchNorm1d(50), nn.Linear(50, 3))


def saved(folder: Path, steps: int = 1) -> Path:
    """The folder of the latest checkpoint of a trained model and its optimizer."""
    trained = model()
    optimizer = torch.optim.AdamW(trained.parameters())
    checkpoints = Checkpoints(folder)
    for step in range(1, steps + 1):
        trained(torch.randn(4, 40)).sum().backward()
        optimizer.step()
        checkpoints.save(trained, at=step, optimizer=optimizer)
    checkpoints.wait()
    assert checkpoints.latest is not None
    return checkpoints.latest


def load(folder: Path, **options: Any) -> int:
    fresh = model(seed=1, **options)
    return Checkpoints(folder).load(fresh, optimizer=torch.optim.AdamW(fresh.parameters()))


def refused(folder: Path, name: str, words: str) -> None:
    """The checkpoint is refused with the file's name, and the model does not change."""
    fresh = model(seed=1)
    before = {key: item.clone() for key, item in fresh.state_dict().items()}
    with pytest.raises(CheckpointError, match=words) as raised:
        Checkpoints(folder).load(fresh, optimizer=torch.optim.AdamW(fresh.parameters()))
    assert name in str(raised.value)
    assert all(torch.equal(item, before[key]) for key, item in fresh.state_dict().items())


def change_byte(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= draw.randrange(1, 256)
    path.write_bytes(data)


def cut(path: Path, draw: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])


def remove(path: Path, draw: random.Random) -> None:
    path.unlink()


@pytest.mark.parametrize("harm", [change_byte, cut, remove])
def test_damage_is_refused_by_the_name_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: Callable[[Path, random.Random], None]
) -> None:
    """A file with a changed byte, a cut file or a missing file is refused by its name, for 60 random places."""
    monkeypatch.setattr(manifest, "BLOCK_BYTES", 1000)
    monkeypatch.setattr("autoshard.checkpoints.files.BLOCK_BYTES", 1000)
    whole = saved(tmp_path / "whole")
    files = [item for item in sorted(whole.iterdir()) if item.stat().st_size]
    draw = random.Random(0)
    for _ in range(DRAWN):
        shutil.copytree(whole.parent, tmp_path / "harmed")
        file = draw.choice(files).name
        harm(tmp_path / "harmed" / whole.name / file, draw)
        refused(tmp_path / "harmed", file, "damaged|missing|cannot be read")
        shutil.rmtree(tmp_path / "harmed")


def test_damage_names_the_tensor(tmp_path: Path) -> None:
    """The error of a changed, cut or missing file also names the tensor that could not be read."""
    folder = saved(tmp_path)
    path = folder / "__0_0.distcp"
    data = path.read_bytes()
    weight = load_weight(tmp_path)
    start = data.index(weight)
    path.write_bytes(data[:start] + b"x" + data[start + 1 :])
    with pytest.raises(
        CheckpointError, match=r"__0_0.distcp is damaged: its bytes from 0 on differ .* bytes \(of model.0.weight\)"
    ):
        load(tmp_path)
    path.write_bytes(data[:start])
    with pytest.raises(CheckpointError, match=rf"it has {start} bytes instead of {len(data)} \(of .*0.weight"):
        load(tmp_path)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"__0_0.distcp is missing \(of .* and \d+ more\)"):
        load(tmp_path)


def load_weight(folder: Path) -> bytes:
    """The saved bytes of a weight."""
    fresh = model(seed=1)
    Checkpoints(folder).load(fresh)
    weight = fresh[0].weight
    assert isinstance(weight, torch.Tensor)
    return weight.detach().numpy().tobytes()


def test_another_model_is_refused(tmp_path: Path) -> None:
    """A model with other parameters, shapes or dtypes is refused with the names, and nothing is loaded."""
    saved(tmp_path)
    with pytest.raises(CheckpointError, match=r"another model: '0.weight' is torch.float32 \[50, 41\] in the model"):
        load(tmp_path, width=41)
    with pytest.raises(CheckpointError, match=r"'weight' is not in the checkpoint.*'0.weight' is not in the model"):
        Checkpoints(tmp_path).load(nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match=r"'0.weight' is torch.float64 \[50, 40\] in the model, torch.float32"):
        Checkpoints(tmp_path).load(model().double())


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    """An optimizer of another class, or over other parameters, or of a name that was not saved, is refused."""
    saved(tmp_path)
    checkpoints, fresh = Checkpoints(tmp_path), model()
    with pytest.raises(CheckpointError, match=r"'optimizer' is a SGD, and the checkpoint has the state of a AdamW"):
        checkpoints.load(fresh, optimizer=torch.optim.SGD(fresh.parameters()))
    with pytest.raises(CheckpointError, match=r"\['1.bias', '1.weight', '2.bias', '2.weight'\] are not in this opt"):
        checkpoints.load(fresh, optimizer=torch.optim.AdamW(fresh[0].parameters()))
    with pytest.raises(CheckpointError, match="nothing saved as schedule="):
        checkpoints.load(fresh, schedule=torch.optim.AdamW(fresh.parameters()))


def test_other_joined_optimizers_are_refused(tmp_path: Path) -> None:
    """Joined optimizers load in another order, and are refused if a parameter has an optimizer of another class."""
    first = nn.Linear(4, 4)
    muon, adamw = torch.optim.Muon([first.weight]), torch.optim.AdamW([first.bias])
    joined = JoinedOptimizer(muon, adamw)
    first(torch.ones(2, 4)).sum().backward()
    joined.step()
    Checkpoints(tmp_path, asynchronous=False).save(first, at=1, optimizer=joined)
    second = nn.Linear(4, 4)
    muon, adamw, sgd = (
        torch.optim.Muon([second.weight]),
        torch.optim.AdamW([second.bias]),
        torch.optim.SGD([second.bias]),
    )
    assert Checkpoints(tmp_path).load(second, optimizer=(turned := JoinedOptimizer(adamw, muon))) == 1
    assert "exp_avg" in turned.state[second.bias]
    with pytest.raises(CheckpointError, match=r"'optimizer' updates 'bias' by SGD, and the checkpoint .* of AdamW"):
        Checkpoints(tmp_path).load(second, optimizer=JoinedOptimizer(muon, sgd))


def test_groups_may_be_others(tmp_path: Path) -> None:
    """The options of an optimizer's groups follow the parameters into other groups, and are refused if a group
    would mix them."""
    first = model()
    groups = [{"params": [*first[0].parameters()], "lr": 0.5}, {"params": [*first[1:].parameters()], "lr": 0.25}]
    Checkpoints(tmp_path, asynchronous=False).save(first, at=1, optimizer=torch.optim.AdamW(groups))
    split = [{"params": [item]} for item in first.parameters()]
    optimizer = torch.optim.AdamW(split)
    Checkpoints(tmp_path).load(first, optimizer=optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5] * 2 + [0.25] * 4
    fresh = model(seed=1)
    with pytest.raises(CheckpointError, match="were saved in 2 groups with different options"):
        Checkpoints(tmp_path).load(fresh, optimizer=torch.optim.AdamW(fresh.parameters()))
    torch.testing.assert_close(fresh.state_dict(), model(seed=1).state_dict())


def test_a_group_without_parameters_keeps_its_options(tmp_path: Path) -> None:
    """An empty group gets the saved options of the empty group, and a second empty group keeps its own."""
    first, checkpoints = nn.Linear(2, 2), Checkpoints(tmp_path, asynchronous=False)
    groups = [{"params": [*first.parameters()]}, {"params": [], "lr": 0.25}]
    checkpoints.save(first, at=1, optimizer=torch.optim.AdamW(groups))
    more = [{"params": [*first.parameters()], "lr": 0.5}, {"params": []}, {"params": [], "lr": 0.75}]
    optimizer = torch.optim.AdamW(more)
    checkpoints.load(first, optimizer=optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 0.25, 0.75]
    first(torch.ones(1, 2)).sum().backward()
    optimizer.step()


class CountingSGD(torch.optim.SGD):
    """An optimizer with state that belongs to no parameter."""

    def step(self, closure: Any = None) -> Any:
        self.state["counts"]["calls"] = self.state["counts"].get("calls", 0) + 1
        return super().step(closure)


def test_state_of_no_parameter_is_saved(tmp_path: Path) -> None:
    """Optimizer state under a key that is no parameter is saved and loaded."""
    first, fresh, checkpoints = nn.Linear(2, 2), nn.Linear(2, 2), Checkpoints(tmp_path, asynchronous=False)
    trained, optimizer = CountingSGD(first.parameters()), CountingSGD(fresh.parameters())
    trained.step()
    checkpoints.save(first, at=1, optimizer=trained)
    checkpoints.load(fresh, optimizer=optimizer)
    assert optimizer.state["counts"] == {"calls": 1}


class FullDisk:
    """A disk with room for a number of bytes more."""

    def __init__(self, room: int) -> None:
        self.room = room

    def write(self, file: Any, data: Any) -> int:
        self.room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return io.BufferedWriter.write(file, data)

    def __enter__(self) -> None:
        kind = type("Bounded", (io.BufferedWriter,), {"write": lambda file, data: self.write(file, data)})

        def opened(path: Path, mode: str = "r", **rest: Any) -> Any:
            return kind(io.FileIO(path, mode)) if mode == "wb" else OPEN(path, mode, **rest)

        Path.open = opened  # type: ignore[assignment,method-assign]

    def __exit__(self, *_: object) -> None:
        Path.open = OPEN  # type: ignore[method-assign]


OPEN = Path.open


def check_full_disk(folder: Path) -> None:
    """A full disk raises one error on every rank with file and tensor, keeps the previous checkpoint, and the next
    save works."""
    trained, checkpoints = model(width=10_000), Checkpoints(folder, keep=1)
    checkpoints.save(trained, at=1)
    checkpoints.wait()
    rank = dist.get_rank() if dist.is_initialized() else 0
    with FullDisk(1 << 20 if rank == 0 else 1 << 30):
        checkpoints.save(trained, at=2)
        trained(torch.randn(4, 10_000))
        with pytest.raises(CheckpointError, match=SPACE):
            checkpoints.wait()
    assert [item.name for item in folder.iterdir()] == ["step-1"]
    with FullDisk(1500):
        checkpoints.save(trained, at=3)
        assert checkpoints._saving is not None
        assert checkpoints._saving.ended.exception() is not None
    with pytest.raises(CheckpointError, match=r"Saving step 3 .* failed"):
        checkpoints.save(trained, at=4)
    checkpoints.wait()
    assert checkpoints.load(trained) == 4


SPACE = (
    r"Saving step 2 to .* failed. .*__0_0.distcp cannot be written, while model.0.weight was written: No space left on "
    "device. The previous checkpoints are intact, and training can go on."
)


def test_a_full_disk(tmp_path: Path) -> None:
    """In one process, a full disk raises one error and keeps the previous checkpoint."""
    check_full_disk(tmp_path)


def check_missing_shard(folder: Path) -> None:
    """A damaged file that one rank reads, and a missing file, are errors on every rank."""
    trained, checkpoints = model(), Checkpoints(folder)
    checkpoints.save(trained, at=1)
    checkpoints.wait()
    if dist.get_rank() == 0:
        change_byte(folder / "step-1" / "__1_0.distcp", random.Random(0))
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"Loading .*step-1 failed. .*__1_0.distcp is damaged"):
        checkpoints.load(trained)
    if dist.get_rank() == 0:
        (folder / "step-1" / "__1_0.distcp").unlink()
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"ranks \[0, 1\]: .*__1_0.distcp is missing \(of .*model.0.bias"):
        checkpoints.load(trained)


def test_on_two_processes(tmp_path: Path) -> None:
    """The checks of a full disk and of a missing file pass on two processes."""
    checks = {name: partial(check, tmp_path / name) for name, check in PAIR_CHECKS.items()}
    outcomes = run_checks(checks, ranks=2, deadline_s=100)
    for name in checks:
        report(outcomes, name)


PAIR_CHECKS = {"full disk": check_full_disk, "missing shard": check_missing_shard}


def test_what_cannot_be_saved_is_refused_at_once(tmp_path: Path) -> None:
    """A wrong argument of `Checkpoints` or `save` raises `CheckpointError`, and the message names the argument."""
    checkpoints = Checkpoints(tmp_path)
    for name in ("every", "keep"):
        with pytest.raises(CheckpointError, match=f"{name}=0: pass a whole number"):
            Checkpoints(tmp_path, **{name: 0})
    with pytest.raises(CheckpointError, match="timeout_s=0: pass a number of seconds"):
        Checkpoints(tmp_path, timeout_s=0)
    with pytest.raises(CheckpointError, match="at=-1: pass the number of steps"):
        checkpoints.save(model(), at=-1)
    with pytest.raises(CheckpointError, match=r"seed=int\(...\) has no state_dict"):
        checkpoints.save(model(), at=1, seed=3)
    with pytest.raises(CheckpointError, match="model= is always saved"):
        checkpoints.save(model(), at=1, model=model())
    with pytest.raises(CheckpointError, match="A int is not a model"):
        checkpoints.save(3, at=1)  # type: ignore[arg-type]
