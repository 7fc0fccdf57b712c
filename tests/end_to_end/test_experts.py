"""Mixtures of experts from transformers, unmodified, train as on one device, however their experts are split."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

import autoshard
import autoshard.kernels as kernels
from autoshard import Mesh, Plan, Recipe
from autoshard.rules.enumeration import Strategy
from autoshard.testing import check_plan
from autoshard.testing.decided_plans import greedy_plan
from autoshard.tracing import trace
from passes.strategies.enumerate_strategies import Site
from tests.end_to_end.training import assert_equal, assert_trains_alike, train
from tests.runtime.processes import on_processes
from tests.zoo.table import ARCHITECTURES

pytestmark = pytest.mark.filterwarnings("ignore")  # of other people's models

PAIR, SQUARE = Mesh({"expert": 2}), Mesh({"data": 2, "expert": 2})
EXPERTS = (kernels.experts, kernels.experts_backward)

Splits = Mapping[str, tuple[str, ...]]
EXCHANGED: Splits = {"t": ("data", "expert"), "e": ("expert",)}
WAYS: Mapping[str, Splits] = {
    "tokens": {"t": ("data", "expert")},
    "experts": {"t": ("data",), "e": ("expert",)},
    "intermediate values": {"t": ("data",), "i": ("expert",)},
    "tokens sent to experts": EXCHANGED,
    "tokens sent over both axes": {"t": ("data", "expert"), "e": ("data", "expert")},
}
"""For each way to split expert layers, the mesh axes that split tokens (t), experts (e) and inner values (i)."""

ROOMY = 10**12
"""Memory budget in bytes, so large that exchanged tokens keep their rows for the backward."""


def plan_with(splits: Splits, model: nn.Module, inputs: dict[str, Any], mesh: Mesh) -> Plan:
    """Return a plan without partial sums where possible, whose expert layers are split as `splits` says."""
    wanted = {factor: tuple(axis for axis in axes if axis in mesh.axis_names) for factor, axes in splits.items()}
    wanted = {factor: axes for factor, axes in wanted.items() if axes}

    def score(site: Site, strategy: Strategy) -> float:
        if site.node is not None and site.node.target in EXPERTS:
            return float(strategy.splits(mesh) == wanted)
        return -sum(bool(spec.partial) for spec in strategy.outputs)

    program = trace(model, (), inputs)
    plan = greedy_plan(program, mesh, score)
    layers = [plan.nodes[node.name].inputs for node in program.graph.nodes if node.target is kernels.experts]
    assert layers
    assert all((x.axes_of(0), down.axes_of(0)) == (wanted["t"], wanted.get("e", ())) for x, *_, down in layers)
    return plan


def built(name: str, layers: int = 1) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model whose experts run as transformers' loop, which supports float64, and its batch.

    `layers` is the number of Mixtral's layers; other models ignore it.
    """
    made = ARCHITECTURES[name]
    if name == "mixtral":
        made = replace(made, config={**made.config, "num_hidden_layers": layers})
    model, inputs = made.build()
    model.set_experts_implementation("eager")  # type: ignore[operator]
    return model, inputs


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", WAYS)
def test_layers_of_experts_that_are_split_equal_one_device(way: str) -> None:
    """For each way to split experts, two training steps of Mixtral verify and equal one device."""
    model, inputs = built("mixtral")
    plan = plan_with(WAYS[way], model, inputs, SQUARE)
    check_plan(model, SQUARE, inputs, plan=plan, steps=2, precise=torch.float64).raise_if_different()


@pytest.mark.sample(1)
@pytest.mark.parametrize("memory_bytes", [None, ROOMY])
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_tokens_are_sent_to_the_experts_of_other_models(name: str, memory_bytes: int | None) -> None:
    """Models with shared experts, grouped routing, biases or interleaved gates exchange tokens and equal one device."""
    model, inputs = built(name)
    plan = replace(plan_with(EXCHANGED, model, inputs, PAIR), memory_budget=memory_bytes)
    check_plan(model, PAIR, inputs, plan=plan, steps=2, precise=torch.float64).raise_if_different()


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", ["tokens sent to experts", "tokens sent over both axes"])
def test_rows_that_are_kept_equal_one_device(way: str) -> None:
    """With kept rows, four ranks equal one device, although one expert gets no tokens."""
    model, inputs = built("mixtral")
    gate: Any = model.get_parameter("model.layers.0.mlp.gate.weight")
    with torch.no_grad():
        gate[:2] = torch.stack(
            (gate[2], 2 * gate[2])
        )  # of the first three experts the first is never among the best two
    plan = replace(plan_with(WAYS[way], model, inputs, SQUARE), memory_budget=ROOMY)
    sharded: Any = autoshard.compile(model, SQUARE, plan=plan)
    sharded(**inputs)
    targets = [node.target for node in sharded.program.phased.backward.graph.nodes]
    assert targets.count(kernels.exchanged_experts_kept_backward) == len(model.model.layers)  # type: ignore[union-attr, arg-type]
    check_plan(model, SQUARE, inputs, plan=plan, steps=2, precise=torch.float64).raise_if_different()


class Layers(nn.Module):
    """Two expert layers of Mixtral, wide enough that the search exchanges tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = MixtralConfig(hidden_size=128, intermediate_size=512, num_local_experts=8, num_experts_per_tok=2)
        self.layers = nn.ModuleList(MixtralSparseMoeBlock(config) for _ in range(2))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


@pytest.mark.sample(1)
@pytest.mark.parametrize("mesh", [PAIR, Mesh({"pipeline": 2, "expert": 2})], ids=str)
def test_rows_are_kept_of_each_micro_batch(mesh: Mesh) -> None:
    """Three micro-batches that keep exchanged rows train as one device, in one stage and in two stages."""
    model, x = Layers(), 0.1 * torch.randn(6, 256, 128, generator=torch.Generator().manual_seed(1))
    alone = copy.deepcopy(model)
    optimizer, expected = (torch.optim.AdamW(each.parameters(), lr=1e-2, eps=1e-4) for each in (model, alone))
    stages = mesh.size // 2
    recipe = Recipe(data=2, expert=2, pipeline=stages, zero=0, micro_batch=1)
    plan = autoshard.plan(
        model, mesh, example_inputs=(x,), optimizer=optimizer, recipe=recipe, global_batch=len(x), precision=None
    )
    step: Any = autoshard.compile(model, mesh, optimizer=optimizer, plan=plan, example_inputs=(x,))
    assert_trains_alike(step, alone, expected, [(x,)] * 3, parameters=(1e-4, 1e-5))
    targets = [node.target for phased in step.sharded.program.parts for node in phased.backward.graph.nodes]
    assert (plan.micro_batches, kernels.exchanged_experts_kept_backward in targets) == (3, True)


def test_the_loss_that_balances_experts_is_that_of_the_whole_batch() -> None:
    """With tokens exchanged, Mixtral's balancing loss, which counts the whole batch's tokens, equals one device."""
    model, inputs = built("mixtral")
    inputs = {**inputs, "output_router_logits": True}
    plan = plan_with(EXCHANGED, model, inputs, SQUARE)
    check_plan(model, SQUARE, inputs, plan=plan, precise=torch.float64).raise_if_different()


@pytest.mark.slow
def test_experts_are_shared_out_where_memory_is_short() -> None:
    """With half the memory, the planner splits experts over ranks and states the busiest rank's assumed load."""
    config = {
        **ARCHITECTURES["mixtral"].config, "num_hidden_layers": 1, "num_local_experts": 16, "intermediate_size": 256
    }  # fmt: skip
    model, inputs = replace(ARCHITECTURES["mixtral"], config=config).build()
    choose = partial(
        autoshard.plan, model, SQUARE, example_inputs=inputs, optimizer="adamw", precision=None, time_budget_s=10.0
    )
    whole = choose()
    assert whole.predicted.expert_load is None
    plan = choose(memory_budget=whole.predicted.peak_memory_bytes // 2)
    assert plan.parameters["model.layers.0.mlp.experts.gate_up_proj"].spec.axes_of(0)
    assert plan.predicted.expert_load is not None
    assert "busiest experts, assumed" in str(plan)


# On processes.


def check_exchange(memory_bytes: int | None) -> None:
    """With tokens exchanged on two ranks, loss, gradients and parameters after three AdamW steps equal one device."""
    model, inputs = built("mixtral", 2)
    plan = replace(plan_with(EXCHANGED, model, inputs, PAIR), memory_budget=memory_bytes)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("expert",))
    sharded: Any = autoshard.compile(model, mesh, plan=plan)
    assert_equal(train(sharded, inputs), train(built("mixtral", 2)[0], inputs))
    targets = [node.target for node in sharded.program.phased.backward.graph.nodes]
    assert (kernels.exchanged_experts_backward in targets) == (memory_bytes is None)


CHECKS = {"exchange": partial(check_exchange, None), "exchange, rows kept": partial(check_exchange, ROOMY)}

test_on_two_processes = on_processes(CHECKS, ranks=2, slow=["exchange, rows kept"])
