"""Plans with `backend="triton"` are priced with their kernels, and list the kernels."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard import Cluster, Mesh, Plan
from autoshard.ir.recipe import Recipe
from autoshard.kernels.registry import FUSED
from cost_models.compute import matmul_time
from cost_models.device import device
from passes.driver.plan_and_lower import plan_program
from passes.driver.plan_options import PlanOptions
from passes.lowering.count_launches import Traffic
from passes.lowering.fuse_kernels import FuseKernels
from passes.lowering.price_kernels import PriceKernels, marked_kernels
from passes.lowering.split_phases import SplitPhases
from tests.benchmarks.fused_counts import count_both, count_generated, llama_block, llama_block_program
from tests.passes.blocks import blocks_program, h100s
from tests.passes.deep import alike, batch
from tests.passes.launches import count_launches
from tests.passes.questions.test_ask import make_plan

CLUSTER = Cluster("h100_sxm", nodes=1, devices_per_node=2)
H100 = device("h100_sxm")


class Scaled(nn.Module):
    """A sum of squares of scaled values, which no hand-written kernel takes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x * self.scale) * x).square().sum()


class Head(nn.Module):
    """The cross-entropy of a linear layer over a vocabulary."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(hidden), targets)


class PostNorm(nn.Module):
    """A layer with post-norms, whose members have BERT's names."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.LayerNorm = nn.Linear(64, 64), nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.LayerNorm(self.dense(x) + x).square().mean()


@pytest.fixture(scope="module")
def block() -> Plan:
    """The plan with kernels of a Llama block on one device."""
    mesh = Mesh({"x": 1})
    options = PlanOptions(with_baselines=False, with_kernels=True)
    return plan_program(llama_block_program(hidden=512, length=256), mesh, h100s(mesh), options)


def test_a_llama_block_is_priced_with_its_kernels(block: Plan) -> None:
    """Kernels take at most half the launches and 70 % of the bytes of a Llama block, as counted on its programs.

    The step is shorter than the step without kernels, and longer than the sum of its kernels.
    """
    lowered, kernels = llama_block(hidden=512, length=256), block.predicted.kernels
    assert Traffic(kernels.launches_without, kernels.memory_bytes_without) == count_both(lowered)[0]
    assert Traffic(kernels.launches, kernels.memory_bytes) == count_generated(lowered)
    assert kernels.launches <= kernels.launches_without / 2
    assert kernels.memory_bytes <= 0.7 * kernels.memory_bytes_without
    assert block.predicted.launches <= kernels.launches
    assert sum(use.time_s for use in kernels.uses) < block.predicted.step_time_s < kernels.step_time_without_s


def test_plans_with_kernels_hide_collectives() -> None:
    """With kernels, collectives still overlap with computation, ranks send as many bytes, and the step is shorter."""
    mesh = Mesh({"data": 4})
    program = blocks_program(batch=256, length=512, hidden=1024, count=3)
    plain, fused = (
        plan_program(
            program,
            mesh,
            h100s(mesh),
            PlanOptions(recipe=Recipe(data=4), with_kernels=with_kernels, with_baselines=False),
        ).predicted
        for with_kernels in (False, True)
    )
    assert plain.sent_bytes == fused.sent_bytes
    assert fused.overlapped["data"] > 0.5 * plain.overlapped["data"] > 0
    assert fused.step_time_s < plain.step_time_s


@pytest.mark.slow
def test_kernels_of_split_programs_stand_for_whole_calls() -> None:
    """On a mesh, kernels replace each call at most once, and their saved launches sum to the difference of the plan."""
    plan = autoshard.plan(alike(3), CLUSTER.mesh({"x": 2}), example_inputs=batch(), backend="triton", precision=None)
    kernels, gone = plan.predicted.kernels, dict[str, float]()
    for use in kernels.uses:
        for name, share in use.stands_for.items():
            gone[name] = gone.get(name, 0.0) + share
    assert gone
    assert max(gone.values()) <= 1 + 1e-9
    assert kernels.launches_without - kernels.launches == sum(use.times * use.saved_launches for use in kernels.uses)


@pytest.mark.slow
def test_repeated_blocks_have_their_kernels(tmp_path: Path) -> None:
    """A plan without inner blocks counts the launches and bytes of all blocks.

    Its file, print and explanations have them too.
    """
    arguments: Mapping[str, Any] = {"example_inputs": batch(), "precision": None}
    model = alike(10)
    plan = autoshard.plan(model, CLUSTER.mesh({"x": 2}), **arguments, backend="triton")
    kernels = plan.predicted.kernels
    assert plan.repeats
    assert {use.times for use in kernels.uses} >= {1, 5}
    sharded = autoshard.compile(model, Mesh({"x": 2}), plan=plan)
    sharded(*batch())
    whole = sharded.programs[0]
    fused = SplitPhases()(FuseKernels(FUSED)(whole.phased.lowered))
    counted = marked_kernels(PriceKernels(H100)(fused))
    assert kernels.launches == counted.launches
    assert kernels.memory_bytes == counted.memory_bytes
    assert kernels.launches_without == count_launches(whole.phased.lowered.graph_module).launches
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").predicted.kernels == kernels
    assert f"{kernels.launches} launches in place of {kernels.launches_without}" in str(plan)
    assert "triton_bias_gelu" in str(plan)
    found = plan.explain("blocks.9.up.bias")
    assert any(text.startswith("triton_bias_gelu for") for text in found.kernels)
    assert (
        autoshard.plan(model, CLUSTER.mesh({"x": 2}), **arguments).explain("blocks.9.up.bias").kernels == found.kernels
    )


def test_explanations_compare_plans_with_their_kernels() -> None:
    """With kernels, the alternative of an explanation has the step time of a plan with its spec as a constraint."""
    arguments: Mapping[str, Any] = {"example_inputs": (torch.ones(8, 16),), "backend": "triton"}
    plan = autoshard.plan(Scaled(), CLUSTER.mesh({"x": 2}), **arguments)
    found = plan.explain("scale")
    assert found.chosen.step_time_s == plan.predicted.step_time_s < plan.predicted.kernels.step_time_without_s
    item = found.others[0]
    again = autoshard.plan(Scaled(), CLUSTER.mesh({"x": 2}), **arguments, constraints={"scale": item.spec})
    assert item.step_time_s == pytest.approx(again.predicted.step_time_s)


def test_products_within_kernels_are_priced() -> None:
    """The kernels of a linear layer and its loss take longer than their products, one forward and three backward."""
    head, hidden = nn.Linear(256, 8192, bias=False), torch.randn(512, 256, requires_grad=True)
    targets = torch.randint(0, 8192, (512,))
    model = Head(head)
    cluster = Cluster("h100_sxm", nodes=1, devices_per_node=1)
    plan = autoshard.plan(model, cluster.mesh({"x": 1}), example_inputs=(hidden, targets), backend="triton")
    times = {use.name: use.time_s for use in plan.predicted.kernels.uses}
    one = matmul_time(512, 8192, 256, 1, "bf16", H100) - H100.launch_latency_s
    assert times["triton_linear_cross_entropy"] > one
    assert times["triton_linear_cross_entropy_backward"] > 3 * one


def test_kernels_of_one_operator_are_named() -> None:
    """The plan lists the kernels of a layer norm, each of which replaces one call."""
    model = nn.Sequential(nn.Linear(64, 16), nn.LayerNorm(16), Scaled())
    one = Cluster("h100_sxm", nodes=1, devices_per_node=1)
    plan = autoshard.plan(
        model, one.mesh({"x": 1}), example_inputs=(torch.randn(8, 64),), backend="triton", precision=None
    )
    alone = {use.name: dict(use.stands_for) for use in plan.predicted.kernels.uses}
    assert alone["triton_layer_norm"] == {"native_layer_norm": 1.0}
    assert alone["triton_layer_norm_backward"] == {"native_layer_norm_backward": 1.0}


def test_groups_are_shown() -> None:
    """The explanation of a parameter names the kernel that reads it, with its calls and savings, in text and JSON."""
    plan = autoshard.plan(Scaled(), CLUSTER.mesh({"x": 2}), example_inputs=(torch.ones(8, 16),))
    found = plan.explain("scale")
    assert found.kernels
    assert "mul, tanh, mul_1, pow_1, sum_1" in found.kernels[0]
    assert "(forward)" in found.kernels[0]
    assert "less to move" in str(found)
    assert found.to_json()["kernels"] == list(found.kernels)


@pytest.mark.slow
def test_products_are_in_no_group() -> None:
    """The explanation of an embedding table lists no generated kernel."""
    assert make_plan().explain("table.weight").kernels == ()


def test_members_named_in_capitals() -> None:
    """Kernels of parameters with capitals in their names are priced, although fx renames placeholders."""
    inputs = (torch.randn(8, 64),)
    mesh = Cluster.of(H100, 1, devices_per_node=1).mesh({"x": 1})
    plan = autoshard.plan(PostNorm(), mesh, example_inputs=inputs, backend="triton", precision=None)
    assert "triton_bias_add_layer_norm" in {use.name for use in plan.predicted.kernels.uses}
