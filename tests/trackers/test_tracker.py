"""A tracker gives the numbers of each step to writers, one step later, on the first rank alone."""

from __future__ import annotations

import gc
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import autoshard
from autoshard import LossScaling, Mesh, NonFiniteError, NotAvailableError, Options
from autoshard.trackers import CSV, Progress, RunWriter, TensorBoard, WandB
from tests.runtime.processes import report, run_checks

PLAIN = {"loss", "lr", "peak_memory_bytes", "predicted_step_time_s", "predicted_peak_memory_bytes"}
SPEEDS = {"step_time_s", "tokens_per_s", "mfu"}


class Kept:
    """A writer that records its rows."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.is_closed = False

    def log(self, step_number: int, values: Mapping[str, float]) -> None:
        assert not self.is_closed
        self.rows.append((step_number, dict(values)))

    def close(self) -> None:
        self.is_closed = True


class Words(nn.Module):
    """A model that predicts tokens from tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, tokens: Tensor, scale: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.words(tokens)).flatten(0, 1) * scale, tokens.flatten())


TOKENS, ONE = torch.arange(32).view(4, 8) % 16, torch.ones(())


def step_of(mesh: Any = None, **options: Any) -> autoshard.TrainStep:
    model = Words()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = autoshard.compile(model, mesh or Mesh({"data": 2}), optimizer=optimizer, **options)
    assert isinstance(step, autoshard.TrainStep)
    return step


def test_each_step_is_written_a_step_later() -> None:
    """A step's numbers are written when the next step ends, and the last step's when the tracker is closed."""
    step, kept = step_of(), Kept()
    losses = []
    with autoshard.track(step, kept):
        for done in range(3):
            losses.append(float(step(TOKENS, ONE)))
            assert [number for number, _ in kept.rows] == list(range(1, done + 1))
    assert kept.is_closed
    assert [values["loss"] for _, values in kept.rows] == losses
    step(TOKENS, ONE)
    assert len(kept.rows) == 3


def test_the_numbers_of_a_step() -> None:
    """The step that compiles has no speeds. Norms, learning rates and step numbers are those of the run."""
    step, kept = step_of(max_grad_norm=0.1), Kept()
    schedule = torch.optim.lr_scheduler.StepLR(step.optimizer, 1, 0.5)
    norms = []
    with autoshard.track(step, kept, start=7):
        for _ in range(2):
            step(TOKENS, ONE)
            norms.append(float(step.last_grad_norm))  # type: ignore[arg-type]
            schedule.step()
    (first, compiled), (second, values) = kept.rows
    assert (first, second) == (8, 9)
    assert compiled.keys() == PLAIN | {"grad_norm"}
    assert values.keys() == PLAIN | SPEEDS | {"grad_norm"}
    assert [compiled["grad_norm"], values["grad_norm"]] == norms
    assert [compiled["lr"], values["lr"]] == [0.01, 0.005]
    assert values["peak_memory_bytes"] > 1e6


def test_speeds_have_the_definitions_of_the_prediction() -> None:
    """Tokens per second and MFU, multiplied by the step time, equal the tokens and the prediction's product."""
    step, kept = step_of(micro_batches=2), Kept()
    with autoshard.track(step, kept):
        for _ in range(2):
            step(TOKENS, ONE)
    assert step.plan is not None
    predicted, values = step.plan.predicted, kept.rows[-1][1]
    assert values["predicted_step_time_s"] == predicted.step_time_s
    assert values["predicted_peak_memory_bytes"] == predicted.peak_memory_bytes
    assert values["tokens_per_s"] * values["step_time_s"] == pytest.approx(TOKENS.numel())
    assert predicted.mfu is not None
    assert values["mfu"] * values["step_time_s"] == pytest.approx(predicted.mfu * predicted.step_time_s)


def test_groups_and_skipped_steps() -> None:
    """Each group of the optimizer has its learning rate, and skipped steps are counted."""
    model = Words()
    groups = [{"params": model.words.parameters()}, {"params": model.head.parameters(), "lr": torch.tensor(0.5)}]
    step = autoshard.compile(
        model, Mesh({"data": 2}), optimizer=torch.optim.SGD(groups, lr=0.25), options=Options(on_nonfinite="skip")
    )
    kept = Kept()
    with autoshard.track(step, kept):
        step(TOKENS, ONE)
        step(TOKENS, ONE * math.nan)
    assert [(values["lr"], values["lr_1"]) for _, values in kept.rows] == [(0.25, 0.5)] * 2
    assert [values["skipped_steps"] for _, values in kept.rows] == [0.0, 1.0]
    assert math.isnan(kept.rows[1][1]["grad_norm"])


def test_the_scale_of_the_loss() -> None:
    """A skipped step in float16 is counted, and its row has the scale after the step."""
    step, kept = step_of(precision="f16", options=Options(loss_scaling=LossScaling(init_scale=2.0**60))), Kept()
    with autoshard.track(step, kept):
        step(TOKENS, ONE)
    assert [(values["loss_scale"], values["skipped_steps"]) for _, values in kept.rows] == [(2.0**59, 1.0)]


def test_a_step_that_fails_is_not_written() -> None:
    """A step that raises is not written, and the next step is."""
    step, kept = step_of(options=Options(on_nonfinite="raise")), Kept()
    with autoshard.track(step, kept):
        step(TOKENS, ONE)
        with pytest.raises(NonFiniteError):
            step(TOKENS, ONE * math.inf)
        step(TOKENS, ONE)
    assert [number for number, _ in kept.rows] == [1, 2]
    assert all(math.isfinite(values["loss"]) for _, values in kept.rows)


def test_numbers_count_on_after_a_load(tmp_path: Path) -> None:
    """After a restart, the next step has the number after the saved step."""
    step, kept = step_of(), Kept()
    step(TOKENS, ONE)
    checkpoints = autoshard.Checkpoints(tmp_path, asynchronous=False)
    checkpoints.save(step, at=41)
    again = step_of(example_inputs=(TOKENS, ONE))
    with autoshard.track(again, kept):
        checkpoints.load(again)
        again(TOKENS, ONE)
    assert again.steps_done == 42
    assert [number for number, _ in kept.rows] == [42]


def test_numbers_of_the_user() -> None:
    """`add` puts numbers into the row of the last step, and without a step adds none."""
    step, kept = step_of(), Kept()
    tracker = autoshard.track(step, kept)
    tracker.add(early=1.0)
    for number in range(2):
        step(TOKENS, ONE)
        tracker.add(accuracy=torch.tensor(number / 2, requires_grad=True))
    tracker.close()
    tracker.close()
    assert [values["accuracy"] for _, values in kept.rows] == [0.0, 0.5]
    assert "early" not in kept.rows[0][1]


def test_a_tracker_that_is_not_closed_writes_the_last_step() -> None:
    """A tracker that nobody closed is closed when its step is garbage-collected, and otherwise at exit."""
    gc.freeze()  # objects of earlier tests take half a minute to collect
    step, kept = step_of(), Kept()
    assert autoshard.track(step, kept)._close_once.atexit
    step(TOKENS, ONE)
    assert not kept.rows
    del step
    gc.collect()
    gc.unfreeze()
    assert kept.is_closed
    assert len(kept.rows) == 1


def test_a_writer_that_fails_leaves_no_other_open() -> None:
    """An error of a writer's `close` is raised after the other writers are closed."""

    class Broken(Kept):
        def close(self) -> None:
            raise OSError("no space")

    step, whole = step_of(), Kept()
    with pytest.raises(OSError, match="no space"), autoshard.track(step, Broken(), whole):
        step(TOKENS, ONE)
    assert whole.is_closed
    assert [number for number, _ in whole.rows] == [1]


def test_an_optimizer_that_is_not_traced_is_tracked() -> None:
    """A step whose optimizer is not traced has the same numbers."""
    model, kept = Words(), Kept()
    step = autoshard.compile(
        model, Mesh({"data": 2}), optimizer=torch.optim.RMSprop(model.parameters()), max_grad_norm=1.0
    )
    with autoshard.track(step, kept):
        for _ in range(2):
            step(TOKENS, ONE)
    assert kept.rows[1][1].keys() == PLAIN | SPEEDS | {"grad_norm"}


def test_wrong_arguments_are_refused() -> None:
    """A module that is no training step, and an object that is no writer, are refused."""
    with pytest.raises(NotAvailableError, match=r"track\(ShardedModule\): only a training step"):
        autoshard.track(autoshard.compile(Words(), Mesh({"data": 2})), Kept())  # type: ignore[arg-type]
    for wrong in (print, Kept, "runs/a"):
        with pytest.raises(NotAvailableError, match="a writer has the methods log"):
            autoshard.track(step_of(), wrong)  # type: ignore[arg-type]
    for right in (CSV("a"), TensorBoard("a"), WandB(), Progress(), Kept()):
        assert isinstance(right, RunWriter)


# On processes.


def check_on_gloo() -> None:
    """The first rank alone writes, although the loss is computed on another rank."""
    step, kept = step_of(Mesh({"pipeline": 2, "data": 2}), micro_batches=2, options=Options(grad_norm=True)), Kept()
    with autoshard.track(step, kept) as tracker:
        losses = [float(step(TOKENS, ONE)) for _ in range(3)]
        tracker.add(own=2.0)
    if dist.get_rank():
        assert not kept.rows
        return
    assert [values["loss"] for _, values in kept.rows] == losses
    assert kept.rows[-1][1].keys() == PLAIN | SPEEDS | {"grad_norm", "own"}


def test_on_gloo() -> None:
    """On four processes in two stages, the first rank alone writes."""
    report(run_checks({"tracker": check_on_gloo}), "tracker")


@pytest.mark.gpu
def test_numbers_of_a_gpu_arrive_later() -> None:
    """On a GPU, the written losses are those of the run, and each later step has a time."""
    model = Words().cuda()
    step = autoshard.compile(
        model, Mesh({"data": 1}), optimizer=torch.optim.AdamW(model.parameters()), max_grad_norm=1.0
    )
    kept, losses = Kept(), []
    with autoshard.track(step, kept):
        for _ in range(4):
            losses.append(step(TOKENS.cuda(), ONE.cuda()))
    assert [values["loss"] for _, values in kept.rows] == [float(loss) for loss in losses]
    assert all(0 < values["step_time_s"] < 10 for _, values in kept.rows[1:])
