"""In the smallest memory that fits, activations wait on the host for the backward, and training equals one device."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import autoshard
from autoshard import Cluster, DoesNotFitError, Mesh, Plan
from autoshard.kernels.offload import to_host
from passes.memory.lowered_memory import peak_bytes
from tests.end_to_end.training import plain_step
from tests.passes.blocks import Blocks

PAIR = Mesh({"data": 2})


def model_and_input() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Blocks(8, 1), torch.randn(16, 32, 8)


@cache
def tightest_plan() -> Plan:
    """Return the plan for two H100s in the smallest memory that any plan fits in."""
    model, x = model_and_input()
    asked = {"example_inputs": (x,), "precision": None, "time_budget_s": 300.0}  # 15 s on an idle core
    cluster = Cluster("h100_sxm", 1, 2)
    with pytest.raises(DoesNotFitError) as caught:
        autoshard.plan(model, cluster, memory_budget=1000, **asked)
    smallest = caught.value.smallest_bytes
    plan = autoshard.plan(model, cluster, memory_budget=smallest, **asked)
    assert plan.predicted.peak_memory_bytes <= smallest
    return plan


def train(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Return the losses of three steps, and the parameters after them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = [plain_step(model, optimizer, x) for _ in range(3)]
    return [*losses, *(parameter.detach().clone() for parameter in model.parameters())]


def test_training_equals_one_device() -> None:
    """With activations offloaded to the host, losses and parameters of three simulated steps equal one device."""
    plan = tightest_plan()
    assert plan.offload.nodes
    model, x = model_and_input()
    sharded = autoshard.compile(model, PAIR, plan=plan, example_inputs=(x,))
    assert isinstance(sharded, autoshard.ShardedModule)
    assert sharded.program is not None
    phased = sharded.program.phased
    saved = [node for node in phased.lowered.graph_module.graph.nodes if node.name in phased.saved]
    assert any(node.target is to_host for node in saved)
    assert peak_bytes(phased) == plan.predicted.peak_memory_bytes
    expected = train(*model_and_input())
    for mine, theirs in zip(train(sharded, x), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_the_plan_says_what_it_offloads_and_is_saved(tmp_path: Path) -> None:
    """A plan's text, time breakdown and saved file state how much is offloaded."""
    plan = tightest_plan()
    assert f"Offload: {len(plan.offload.nodes)} of {plan.offload.candidates} nodes" in str(plan)
    assert plan.predicted.breakdown["offload"] == pytest.approx(plan.offload.time_s)
    assert sum(map(len, plan.offloaded.values())) == len(plan.offload.nodes)
    assert plan.offload.host_bytes > 0
    assert plan.offload.saved_bytes > 0
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").offload == plan.offload
