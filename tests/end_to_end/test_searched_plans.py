"""Each plan of `plan(global_batch=)` runs and equals one device; if none runs, an error names an alternative."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import autoshard
from autoshard import AutoshardError, Cluster, NotAvailableError, Plan, PlanMismatchError, Recipe
from cost_models.hardware import node_type
from tests.end_to_end.decoders import decoder
from tests.end_to_end.test_recipe_plans import ADAMW, BATCH, EXAMPLES, SHAPE, check_runs

LAYERS = 4


def searched(target: Cluster, **options: Any) -> Plan:
    """Return the plan of a small Llama for a global batch."""
    model, inputs = decoder(replace(SHAPE, layers=LAYERS))
    asked = {"optimizer": ADAMW(model.parameters()), "precision": None, "global_batch": BATCH, **options}
    return autoshard.plan(model, target, example_inputs=inputs, **asked)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Draw two to eight devices in one or two nodes, at full speed or as much slower as the model is smaller."""
    nodes, each = draw(st.sampled_from([(1, 2), (1, 4), (2, 1), (2, 2), (1, 8), (2, 4)]))
    node, slower = node_type("h100_sxm"), draw(st.sampled_from([1.0, 1e4]))
    peaks = {name: peak / slower for name, peak in node.device.peak_flops.items()}
    bandwidth = node.device.memory_bandwidth_bytes_per_s / slower
    device = replace(node.device, peak_flops=peaks, memory_bandwidth_bytes_per_s=bandwidth)
    return Cluster(node.with_device(device), nodes, each)


CONSTRAINTS = (
    {},
    {"pipeline": 1},
    {"pipeline": 2, "virtual_stages": (1, 2)},
    {"tensor": 2, "pipeline": (1, 2)},
    {"zero": 3, "recompute": "full"},
    {"context": 2, "pipeline": 1},
    {"micro_batch": 1, "zero": (1, 2)},
)
"""Constraints that a cluster of two devices can keep."""


@settings(max_examples=max(1, EXAMPLES // 8))
@given(target=clusters(), constraints=st.sampled_from(CONSTRAINTS))
def test_what_is_found_runs(target: Cluster, constraints: dict[str, Any]) -> None:
    """The found plan uses all devices and keeps the constraints, and training equals one device."""
    plan = searched(target, constraints=constraints)
    assert plan.runs
    assert plan.mesh.size == target.size
    assert plan.recipe is not None
    for name, value in constraints.items():
        assert getattr(plan.recipe, name) in (value if isinstance(value, tuple) else (value,))
    sequences = [text for text in plan.inputs.values() if text.startswith("i64")]
    replicas = BATCH // plan.micro_batches
    assert all(text.startswith(f"i64[{replicas},") for text in sequences)
    check_runs(plan, plan.mesh, layers=LAYERS)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"precision": "f8"},
            r"no program that compile runs. Plan with precision='bf16' .* runtime='megatron' prices f8",
        ),
        (
            {"constraints": {"recompute": "selective"}},
            r"keep constraints=\{'recompute': .* but compile runs none of these recipes.* runtime='megatron' prices",
        ),
    ],
)
def test_without_a_program_there_is_no_plan(options: dict[str, Any], words: str) -> None:
    """If no recipe has a program, the error names a call that works, and a plan for another runtime does not run."""
    model, inputs = decoder(replace(SHAPE, layers=LAYERS))
    asked = {"example_inputs": inputs, "optimizer": "adamw", "global_batch": BATCH, **options}
    with pytest.raises(NotAvailableError, match=words):
        autoshard.plan(model.bfloat16(), Cluster("h100_sxm", 1, 4), **asked)
    price = autoshard.plan(model.bfloat16(), Cluster("h100_sxm", 1, 4), runtime="megatron", **asked)
    assert not price.runs
    with pytest.raises(PlanMismatchError, match="under runtime='megatron', and is for reading and comparing"):
        autoshard.compile(model, price.mesh, optimizer=ADAMW(model.parameters()), plan=price)


@pytest.mark.slow
def test_momentum_by_name_has_a_plan() -> None:
    """The plan of optimizer "sgd_momentum" is proven for `SGD` with momentum 0.9."""
    model, inputs = decoder(replace(SHAPE, layers=LAYERS))
    plan = searched(Cluster("h100_sxm", 1, 2), optimizer="sgd_momentum")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert autoshard.prove(model, plan, example_inputs=inputs, optimizer=optimizer).values > 0


@pytest.mark.slow
def test_stages_have_a_plan_when_time_is_short() -> None:
    """A search that its time limit ends returns a plan with stages, which trains as one device."""
    plan = searched(Cluster("h100_sxm", 1, 4), constraints={"pipeline": 4}, time_budget_s=5.0)
    assert plan.runs
    assert len(plan.stages) >= 4
    check_runs(plan, plan.mesh, layers=LAYERS)


class Normalised(nn.Module):
    """Blocks with batch norms, whose buffers change in training."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def test_where_the_fastest_recipe_has_no_plan_the_next_has() -> None:
    """A model with batch norms, which stages refuse, gets a plan without stages from a free search."""
    model, inputs = Normalised(), (torch.randn(8, 64),)
    asked: dict[str, Any] = {"optimizer": "sgd", "precision": "f32", "global_batch": 8, "example_inputs": inputs}
    cluster = Cluster("h100_sxm", 1, 4)
    with pytest.raises(AutoshardError, match="buffer"):
        autoshard.plan(model, cluster, recipe=Recipe(pipeline=2, data=2, micro_batch=2), **asked)
    plan = autoshard.plan(model, cluster, **asked)
    assert plan.runs
    assert not plan.stages


@pytest.mark.slow
def test_a_plan_in_stages_is_asked_questions() -> None:
    """A plan in stages answers `why_not` and `limits`, and a new search can start from it."""
    cluster = Cluster("h100_sxm", 1, 2)
    plan = searched(cluster, constraints={"pipeline": 2})
    answer = plan.why_not("fsdp")
    assert answer.chosen.recipe is not None
    assert answer.chosen.recipe.pipeline == 2
    assert plan.limits().variants
    assert searched(cluster, previous=plan).runs
