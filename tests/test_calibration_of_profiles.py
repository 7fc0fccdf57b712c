"""`autoshard.calibrate(step)` corrects the step's hardware by its profile.

The measured steps are predictions for other hardware here, so that no test depends on this machine's speed.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import autoshard
from autoshard import Cluster, Mesh, NotAvailableError
from autoshard.calibration import learned_from
from autoshard.ir.profile import PredictedSteps, Profile
from autoshard.ir.request import CompiledProgram
from cost_models.hardware import Cluster as PricedCluster
from cost_models.hardware import node_type
from cost_models.refit import refitted
from passes.prediction.predict_steps import predict_steps

NODES = {"cpu_laptop": Cluster("cpu_laptop", 1, 2), "h100_sxm": Cluster("h100_sxm", 1, 2)}
FACTORS = st.floats(0.2, 5.0)


@cache
def program() -> CompiledProgram:
    """The program of a step, whose products, sums and collectives take about equally long on CPUs."""
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.LayerNorm(1024), nn.Linear(1024, 256))
    step = autoshard.compile(
        model,
        Mesh({"data": 2}),
        optimizer=torch.optim.AdamW(model.parameters()),
        loss_fn=lambda outputs: outputs.square().mean(),
        example_inputs=(torch.zeros(512, 256),),
    )
    found = step.sharded.program  # type: ignore[union-attr]
    assert found is not None
    return found


def truth(cluster: PricedCluster, factors: dict[str, float], launch: float) -> PredictedSteps:
    """A step on hardware whose constants differ from the table's by factors."""
    node = refitted(cluster.node, factors, launch * cluster.node.device.launch_latency_s)
    return predict_steps(program(), Cluster(node, cluster.nodes, cluster.devices_per_node))


def profile_of(real: PredictedSteps, cluster: PricedCluster) -> Profile:
    """A profile that measured `real` on both ranks, compared with the prediction for `cluster`."""
    return Profile(((real.steps[0],),) * 2, predict_steps(program(), cluster), (0, 0))


def ratio(predicted: PredictedSteps, real: PredictedSteps) -> float:
    return predicted.steps[0].duration_ns / real.steps[0].duration_ns


@pytest.mark.parametrize("node", NODES)
@settings(max_examples=20, deadline=None)
@example(memory=1.0, matmul=1.0, link=1.0, launch=1.0)
@example(memory=5.0, matmul=0.2, link=3.0, launch=2.0)
@given(memory=FACTORS, matmul=FACTORS, link=FACTORS, launch=st.floats(0.5, 2.0))
def test_the_calibrated_prediction_is_nearer(
    node: str, memory: float, matmul: float, link: float, launch: float
) -> None:
    """After one profile, a table with wrong constants predicts the measured step within 10 %."""
    cluster = NODES[node]
    real = truth(cluster, {"memory": memory, "matmul.f32": matmul, "link.intra": link}, launch)
    profile = profile_of(real, cluster)
    found = learned_from(profile, "measured")
    before, after = (ratio(each, real) for each in (profile.predicted, predict_steps(program(), found.cluster)))
    assert abs(log(after)) <= max(0.1, abs(log(before)))
    assert abs(log(after)) < 0.1


def test_another_plan_is_found_after_calibration(tmp_path: Path) -> None:
    """On links that a profile shows to be slow, a new search prints how much faster its plan is than
    the previous plan."""
    options: dict[str, Any] = {
        "example_inputs": (torch.zeros(64, 512, device="meta"),),
        "loss_fn": lambda outputs: outputs.square().mean(),
        "optimizer": "adamw",
        "precision": None,
    }
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))
    mesh, cluster = Mesh({"data": 2}), NODES["cpu_laptop"]
    first = autoshard.plan(model, cluster.mesh(mesh), **options)
    assert first.speedup_over_previous is None
    same = autoshard.plan(model, cluster.mesh(mesh), previous=first, **options)
    assert same.speedup_over_previous == pytest.approx(1.0)
    assert "No faster plan than the previous plan was found" in str(same)
    slow = learned_from(profile_of(truth(cluster, {"link.intra": 50.0}, 1.0), cluster), "slow_links")
    slow.save(tmp_path / "slow.toml")
    again = autoshard.plan(model, Cluster.load(tmp_path / "slow.toml").mesh(mesh), previous=first, **options)
    assert again.speedup_over_previous is not None
    assert again.speedup_over_previous > 1.1
    assert f"{again.speedup_over_previous:.2f} times as long as this plan." in str(again)
    assert again.baselines["the plan before"] > first.predicted.step_time_s  # type: ignore[operator]


def test_memory_and_names_are_kept() -> None:
    """Calibration keeps the device's memory, or takes a given one, and names measurements by constants."""
    cluster = NODES["cpu_laptop"]
    profile = profile_of(truth(cluster, {"memory": 2.0}, 1.0), cluster)
    found = learned_from(profile, "mine")
    assert found.cluster.node.name == "mine"
    assert found.cluster.device.memory_bytes == cluster.device.memory_bytes
    assert learned_from(profile, "mine", 2**30).cluster.device.memory_bytes == 2**30
    assert {"memory", "matmul.f32", "link.intra"} <= found.measured_s.keys() == found.ratios.keys()
    assert list(found.ratios.values()) == pytest.approx([1.0] * len(found.ratios))


def test_a_step_without_a_profile_is_refused() -> None:
    """A step without a profile, an object that is no step, and a profile of simulated ranks are refused."""
    model = nn.Linear(4, 4)
    step = autoshard.compile(model, Mesh({"data": 2}), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(NotAvailableError, match="the step has no profile"):
        autoshard.calibrate(step)  # type: ignore[arg-type]
    with pytest.raises(NotAvailableError, match="'step' is no training step"):
        autoshard.calibrate("step")  # type: ignore[arg-type]
    cluster = NODES["cpu_laptop"]
    profile = replace(profile_of(predict_steps(program(), cluster), cluster), is_simulated=True)
    with pytest.raises(NotAvailableError, match="one process simulated all ranks"):
        autoshard.calibrate(profile)
    assert node_type("cpu_laptop").device.memory_bytes == cluster.device.memory_bytes
