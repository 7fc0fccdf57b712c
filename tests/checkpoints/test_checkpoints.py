"""Checkpoints that four ranks save load on four ranks, on two under another plan, on the
simulator, and on one device."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor

import autoshard
from autoshard import CheckpointError, Checkpoints, P
from autoshard.checkpoints import CheckpointReader
from tests.checkpoints.runs import (
    LINE,
    ONE,
    PAIR,
    SQUARE,
    TENSOR,
    WEIGHTS,
    ZERO_1,
    ZERO_3,
    Counter,
    Run,
    assert_same,
    batch,
    groups,
    net,
)
from tests.runtime.processes import report, run_checks

SAVED, MORE = 3, 10
SAVERS: dict[str, tuple[str, Any, Any]] = {
    "traced": ("traced", LINE, ZERO_3),
    "momentum": ("momentum", SQUARE, TENSOR),
    "own": ("own", LINE, WEIGHTS),
}
LOADERS: dict[str, tuple[Any, Any]] = {"traced": (PAIR, ZERO_1), "momentum": (PAIR, ZERO_3), "own": (PAIR, {})}


def check_saving(folder: Path, name: str) -> None:
    """A checkpoint has the values of its step although training goes on. A run that loads it under the same plan
    is equal bit for bit."""
    run = Run(*SAVERS[name])
    checkpoints = Checkpoints(folder / name)
    assert checkpoints.load(run.step, schedule=run.schedule) == 0
    run.train(0, SAVED)
    values = run.values()
    assert checkpoints.save(run.step, at=SAVED, schedule=run.schedule)
    losses = run.train(SAVED, SAVED + MORE)
    checkpoints.wait()
    if dist.get_rank() == 0:
        torch.save((values, losses), folder / f"{name}.expected")
    again = Run(*SAVERS[name], seed=1)
    again.train(0, 1)
    assert checkpoints.load(again.step, schedule=again.schedule) == SAVED
    assert_same(again.values(), values)
    assert again.train(SAVED, SAVED + MORE) == losses


def check_loading(folder: Path, name: str, where: tuple[Any, Any], *, planned: bool = True) -> None:
    """Loaded parameters, state and seeds equal the saved ones, and the next losses equal those of the run that did
    not stop."""
    values, losses = torch.load(folder / f"{name}.expected")
    run = Run(SAVERS[name][0], *where, seed=2, planned=planned)
    assert Checkpoints(folder / name).load(run.step, schedule=run.schedule) == SAVED
    assert_same(run.values(), values)
    assert run.train(SAVED, SAVED + MORE) == pytest.approx(losses, rel=1e-6)


def check_from_one(folder: Path) -> None:
    """Two ranks load the checkpoint that one process saved, and train on with its losses."""
    values, losses = torch.load(folder / "one.expected")
    run = Run("traced", PAIR, ZERO_3, seed=2)
    assert Checkpoints(folder / "one").load(run.step, schedule=run.schedule) == SAVED
    assert_same(run.values(), values)
    assert run.train(SAVED, SAVED + MORE) == pytest.approx(losses, rel=1e-6)


def save_on_one(folder: Path) -> None:
    run = Run("traced", ONE, {})
    run.train(0, SAVED)
    Checkpoints(folder / "one").save(run.step, at=SAVED, schedule=run.schedule)
    torch.save((run.values(), run.train(SAVED, SAVED + MORE)), folder / "one.expected")


def check_state_lies_as_planned(folder: Path) -> None:
    """Under ZeRO-1, a loading rank has a shard of the state of a parameter that it holds whole."""
    run = Run("traced", PAIR, ZERO_1)
    Checkpoints(folder / "traced").load(run.step, schedule=run.schedule)
    weight = run.step.sharded.get_parameter("second.weight")
    held = run.step.optimizer.state[weight]["exp_avg"]
    assert isinstance(weight, DTensor)
    assert isinstance(held, DTensor)
    assert weight.to_local().shape == (6, 7)
    assert held.to_local().shape == (3, 7)


def check_loading_before_a_plan(folder: Path) -> None:
    """A step that is not compiled yet loads whole tensors, and trains on with the losses of the saved run."""
    check_loading(folder, "traced", LOADERS["traced"], planned=False)


def check_own_states(folder: Path) -> None:
    """A state that is equal on all ranks, and a state that differs on each rank, come back to each rank."""
    run = Run("momentum", LINE, {})
    alike, own = Counter("alike"), Counter(f"rank {dist.get_rank()}")
    checkpoints = Checkpoints(folder / "states")
    checkpoints.save(run.step, at=1, alike=alike, own=own)
    checkpoints.wait()
    alike.value = own.value = None
    assert checkpoints.load(run.step, alike=alike, own=own) == 1
    assert (alike.value, own.value) == ("alike", f"rank {dist.get_rank()}")


def check_own_states_elsewhere(folder: Path) -> None:
    """States that differ on four ranks are refused on two, by name. Without them the checkpoint loads."""
    run = Run("momentum", PAIR, {})
    alike, own = Counter(), Counter()
    checkpoints = Checkpoints(folder / "states")
    with pytest.raises(CheckpointError, match=r"own=: each of the 4 ranks .* had a state of its own, but 2 ranks load"):
        checkpoints.load(run.step, alike=alike, own=own)
    assert checkpoints.load(run.step, alike=alike) == 1
    assert alike.value == "alike"


def check_each_byte_is_written_once(folder: Path) -> None:
    """No rank writes more than half of the values that all four ranks hold."""
    step = autoshard.compile(net(0), LINE, constraints={"*": P()}, example_inputs=(batch(0)[0],))
    Checkpoints(folder / "shared", asynchronous=False).save(step, at=0)
    dist.barrier()
    written = [item.stat().st_size for item in (folder / "shared" / "step-0").glob("*.distcp")]
    assert len(written) == 4
    assert max(written) < sum(written) / 2


def check_own_loop(folder: Path) -> None:
    """A model and an optimizer of a user's own loop are saved and loaded on four ranks."""
    loss = own_loop(folder, LINE, load=False)
    assert own_loop(folder, LINE, load=True) == loss


def own_loop(folder: Path, mesh: Any, *, load: bool) -> float:
    model = net(int(load))
    sharded = autoshard.compile(model, mesh, constraints={"*weight": P("data")}, example_inputs=(batch(0)[0],))
    optimizer = torch.optim.AdamW(groups(sharded), lr=0.1)
    checkpoints = Checkpoints(folder / "loop", every=2)

    def train() -> float:
        loss = sharded(batch(0)[0]).square().mean()
        loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    if load:
        assert checkpoints.load(sharded, optimizer=optimizer) == 2
    else:
        train()
        assert not checkpoints.save(sharded, at=1, optimizer=optimizer)
        train()
        assert checkpoints.save(sharded, at=2, optimizer=optimizer)
    losses = [train() for _ in range(3)]
    checkpoints.wait()
    return losses[-1]


def check_ranks_that_save_different_steps(folder: Path) -> None:
    """Ranks that save different steps get an error on every rank."""
    run = Run("momentum", PAIR, {})
    checkpoints = Checkpoints(folder / "different")
    checkpoints.save(run.step, at=dist.get_rank())
    with pytest.raises(CheckpointError, match=r"Ranks save different things"):
        checkpoints.wait()


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


FOUR = {
    **{f"saving {name}": partial(check_saving, name=name) for name in SAVERS},
    "own states": check_own_states,
    "written once": check_each_byte_is_written_once,
    "own loop": check_own_loop,
}
TWO = {
    **{f"loading {name}": partial(check_loading, name=name, where=LOADERS[name]) for name in SAVERS},
    "from one": check_from_one,
    "state as planned": check_state_lies_as_planned,
    "before a plan": check_loading_before_a_plan,
    "own states elsewhere": check_own_states_elsewhere,
    "different steps": check_ranks_that_save_different_steps,
}


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, str]:
    save_on_one(folder)
    four = run_checks({name: partial(check, folder) for name, check in FOUR.items()}, ranks=4, deadline_s=300)
    return {
        **four,
        **run_checks({name: partial(check, folder) for name, check in TWO.items()}, ranks=2, deadline_s=200),
    }


@pytest.mark.parametrize("name", [*FOUR, *TWO])
def test_on_processes(outcomes: dict[str, str], name: str) -> None:
    """The check of this name passes on every rank."""
    report(outcomes, name)


@pytest.mark.parametrize("name", SAVERS)
@pytest.mark.parametrize("mesh", [ONE, PAIR], ids=str)
def test_on_one_device(outcomes: dict[str, str], folder: Path, name: str, mesh: Any) -> None:
    """One process loads the checkpoint of four ranks, on one device and on a simulated mesh."""
    report(outcomes, f"saving {name}")
    check_loading(folder, name, (mesh, {}))


def test_a_plain_module_loads(outcomes: dict[str, str], folder: Path) -> None:
    """A plain module and an optimizer of torch load the checkpoint of four ranks."""
    report(outcomes, "saving traced")
    values, _ = torch.load(folder / "traced.expected")
    model = net(3)
    optimizer = torch.optim.AdamW(groups(model))
    assert Checkpoints(folder / "traced").load(model, optimizer=optimizer) == SAVED
    assert_same({f"model.{name}": item for name, item in model.state_dict().items()}, _under("model.", values))
    for name, parameter in model.named_parameters():
        found = {f"{name}.{key}": item for key, item in optimizer.state[parameter].items()}
        assert_same(found, _under(f"{name}.", values))


def test_the_library_reads_the_files(outcomes: dict[str, str], folder: Path) -> None:
    """`torch.distributed.checkpoint` loads a checkpoint with autoshard's reader."""
    report(outcomes, "saving traced")
    values, _ = torch.load(folder / "traced.expected")
    state = {"model": net(3).state_dict()}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, storage_reader=CheckpointReader(folder / "traced" / f"step-{SAVED}"))
    assert_same({f"model.{name}": item for name, item in state["model"].items()}, _under("model.", values))


def test_the_plan_is_in_the_checkpoint(tmp_path: Path) -> None:
    """A checkpoint has the plan of its step in `plan.json`."""
    run = Run("traced", PAIR, {})
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(run.step, at=1)
    checkpoints.wait()
    assert checkpoints.latest is not None
    assert autoshard.Plan.load(checkpoints.latest / "plan.json") == run.step.plan


def test_random_numbers_go_on(tmp_path: Path) -> None:
    """After a load, the generators of torch, Python and NumPy draw the numbers that followed the save."""
    import random

    import numpy as np

    def draw() -> tuple[float, float, float]:
        return torch.rand(()).item(), random.random(), np.random.rand()

    model, checkpoints = nn.Linear(2, 2), Checkpoints(tmp_path)
    checkpoints.save(model, at=0)
    expected = draw()
    checkpoints.load(model)
    assert draw() == expected


def _under(prefix: str, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: item for name, item in values.items() if name.startswith(prefix)}
