"""The estimate of a whole run, `plan.run`."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard import Mesh, NotAvailableError, P, Plan
from autoshard.ir.plan_parts import ParameterPlan, Prediction

PARAMETERS = {"w": ParameterPlan(P("data"), (10, 3), 60, state={"exp_avg": P(), "exp_avg_sq": P()})}
PREDICTED = Prediction(2.0, 2**30, {"forward compute": 2.0}, {}, tokens_per_s=1000.0)
PLAN = Plan(
    mesh=Mesh({"data": 2}), program_digest="", inputs={}, nodes={}, outputs={"parameter_update w": P()},
    parameters=PARAMETERS, predicted=PREDICTED, objective=1.0, lower_bound=None, search_time_s=0.0, hardware="h100:1x2",
)  # fmt: skip


def test_a_run_without_failures_is_its_steps_and_one_save() -> None:
    """Without failures the run has its steps and one checkpoint, at the end."""
    run = PLAN.run(tokens=2e8, save_s=10.0)
    assert run.steps == run.checkpoint_every == 100_000
    assert run.days == pytest.approx((200_000 + 10) / 86400)
    assert run.device_hours == pytest.approx(2 * 24 * run.days)
    assert run.failures == run.lost_to_failures == 0
    assert run.lost_to_checkpoints == pytest.approx(10 / 200_010)


def test_a_run_with_failures() -> None:
    """Checkpoints have the best interval, and the shares of steps, checkpoints and failures add up to the run."""
    run = PLAN.run(tokens=2e8, mtbf_hours=6, save_s=300.0, restart_s=600.0)
    assert run.checkpoint_every * run.step_time_s == pytest.approx(57 * 60, rel=0.01)
    assert run.failures == pytest.approx(run.days * 4)
    useful = run.days_of_steps / run.days
    assert useful + run.lost_to_checkpoints + run.lost_to_failures == pytest.approx(1)
    assert 0.05 < run.lost_to_checkpoints < 0.1 < run.lost_to_failures < 0.2


def test_more_failures_never_shorten_a_run() -> None:
    """With more failures, a run takes more days, and checkpoints are closer."""
    runs = [PLAN.run(steps=10**6, mtbf_hours=hours, save_s=30.0) for hours in (math.inf, 1000, 100, 10, 1)]
    assert [run.days for run in runs] == sorted(run.days for run in runs)
    assert [run.checkpoint_every for run in runs] == sorted((run.checkpoint_every for run in runs), reverse=True)


def test_steps_and_tokens_are_two_ways_to_say_one_length() -> None:
    """A run of three steps has their tokens, and a run of tokens has its last step counted whole."""
    assert PLAN.run(steps=3).tokens == 6000
    assert PLAN.run(tokens=6001).steps == 4


def test_a_checkpoint_has_parameters_and_state_once() -> None:
    """A checkpoint has the 30 parameters and two tensors of state, four bytes each, without copies or padding."""
    assert PLAN.run(steps=1).checkpoint_bytes == 3 * 30 * 4
    assert PLAN.run(steps=1, checkpoint_bytes=7).checkpoint_bytes == 7


@pytest.mark.parametrize("mesh", [{"data": 2}, {"pipeline": 2, "data": 2}])
def test_the_bytes_of_a_searched_plan(mesh: dict[str, int]) -> None:
    """Under any plan, a checkpoint of AdamW has three times the bytes of the parameters."""
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    batch = (torch.ones(8, 5),)
    plan = autoshard.plan(
        model, Mesh(mesh), example_inputs=batch, optimizer="adamw", loss_fn=lambda y: y.sum(), precision=None
    )
    wanted = 3 * sum(item.numel() * item.itemsize for item in model.parameters())
    assert plan.run(steps=1).checkpoint_bytes == wanted


def test_the_time_of_a_save_is_by_the_devices_bandwidth() -> None:
    """By default all devices write their parts at once, so that twice the devices need half the time."""
    one, two = PLAN, replace(PLAN, mesh=Mesh({"data": 4}))
    first, second = (plan.run(steps=1, checkpoint_bytes=10**12) for plan in (one, two))
    assert first.save_s == pytest.approx(2 * second.save_s) == pytest.approx(10**12 / (2 * 1.22e8))


def test_the_answer_is_data() -> None:
    """The estimate is JSON data, in which an infinite time between failures is None."""
    data = json.loads(json.dumps(PLAN.run(steps=1).to_json(), allow_nan=False))
    assert data["mtbf_hours"] is None
    assert data["steps"] == 1


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, r"run\(tokens=None, steps=None\): pass one of tokens= and steps=\."),
        ({"tokens": 1.0, "steps": 1}, r"pass one of tokens= and steps=\."),
        ({"steps": 1.5}, r"steps=1\.5 must be a whole number, at least 1\."),
        ({"steps": 10**5000}, r"steps= is above 1,000,000,000,000, more than any run takes\."),
        ({"tokens": -1}, r"tokens=-1 must be a number of tokens above 0\."),
        ({"tokens": math.inf}, r"tokens=inf must be a number of tokens above 0\."),
        ({"steps": 1, "mtbf_hours": 0}, r"mtbf_hours=0 must be a number of hours above 0\."),
        ({"steps": 1, "mtbf_hours": "50"}, r"mtbf_hours='50' must be a number of hours above 0\."),
        ({"steps": 1, "save_s": math.nan}, r"save_s=nan must be a number of seconds above 0\."),
        ({"steps": 1, "restart_s": 0}, r"restart_s=0 must be a number of seconds above 0\."),
        ({"steps": 1, "checkpoint_bytes": 0}, r"checkpoint_bytes=0 must be a number of bytes above 0\."),
        ({"steps": 9, "mtbf_hours": 0.01, "save_s": 999}, r"save takes 999 s and a restart 600 s, so the run would"),
    ],
)
def test_what_is_refused(asked: dict[str, Any], message: str) -> None:
    """Each wrong argument is refused by name."""
    with pytest.raises(NotAvailableError, match=message):
        PLAN.run(**asked)


def test_a_plan_without_tokens() -> None:
    """A plan whose inputs are no tokens refuses `tokens`, and its run of steps has no tokens."""
    plan = replace(PLAN, predicted=replace(PREDICTED, tokens_per_s=None))
    with pytest.raises(NotAvailableError, match=r"has no input of integers\. Pass steps=\."):
        plan.run(tokens=1e9)
    assert plan.run(steps=2).tokens is None


def test_a_plan_without_optimizer() -> None:
    """Without optimizer state in the plan, a run needs `checkpoint_bytes`."""
    plan = replace(PLAN, outputs={})
    with pytest.raises(NotAvailableError, match=r"Pass optimizer= to autoshard\.plan, or checkpoint_bytes= here\."):
        plan.run(steps=1)
    assert plan.run(steps=1, checkpoint_bytes=10).checkpoint_bytes == 10
