"""Mixtures of experts from transformers, unmodified, train as on one device, however their experts are split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autoshard
import autoshard.kernels as kernels
from autoshard import Mesh, Plan
from autoshard.rules.enumeration import Strategy
from autoshard.testing import check_plan
from autoshard.testing.decided_plans import greedy_plan
from autoshard.tracing import trace
from passes.strategies.enumerate_strategies import Site
from tests.end_to_end.training import assert_equal, train
from tests.runtime.processes import report, run_checks
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
"""Factors that axes split in the layers of experts."""


def plan_with(splits: Splits, model: nn.Module, inputs: dict[str, Any], mesh: Mesh) -> Plan:
    """A plan that splits much, and layers of experts as it is told to."""
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


def built(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model whose own experts are a loop, which knows float64, and its batch."""
    model, inputs = ARCHITECTURES[name].build()
    model.set_experts_implementation("eager")  # type: ignore[operator]
    return model, inputs


@pytest.mark.parametrize("way", WAYS)
def test_layers_of_experts_that_are_split_equal_one_device(way: str) -> None:
    """Proven and run: loss, gradients and parameters after two steps of Mixtral."""
    model, inputs = built("mixtral")
    plan = plan_with(WAYS[way], model, inputs, SQUARE)
    check_plan(model, SQUARE, inputs, plan=plan, steps=2, precise=torch.float64).raise_if_different()


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_tokens_are_sent_to_the_experts_of_other_models(name: str) -> None:
    """Shared experts, a router of groups, biases and interleaved gates."""
    model, inputs = built(name)
    plan = plan_with(EXCHANGED, model, inputs, PAIR)
    check_plan(model, PAIR, inputs, plan=plan, steps=2, precise=torch.float64).raise_if_different()


def test_the_loss_that_balances_experts_is_that_of_the_whole_batch() -> None:
    """The auxiliary loss of Mixtral, which counts what each expert gets of all tokens."""
    model, inputs = built("mixtral")
    inputs = {**inputs, "output_router_logits": True}
    plan = plan_with(EXCHANGED, model, inputs, SQUARE)
    check_plan(model, SQUARE, inputs, plan=plan, precise=torch.float64).raise_if_different()


@pytest.mark.slow
def test_experts_are_shared_out_where_memory_is_short() -> None:
    """By price, where nearly all weights are experts'; the plan says what load of the busiest rank it assumes."""
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


def check_exchange() -> None:
    """Loss, gradients, and parameters after three steps of AdamW."""
    model, inputs = built("mixtral")
    plan = plan_with(EXCHANGED, model, inputs, PAIR)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("expert",))
    sharded: Any = autoshard.compile(model, mesh, plan=plan)
    assert_equal(train(sharded, inputs), train(built("mixtral")[0], inputs))


CHECKS = {"exchange": check_exchange}


@cache
def outcomes() -> dict[str, str]:
    """Outcomes of all checks, on two processes."""
    return run_checks(CHECKS, ranks=2)


@pytest.mark.parametrize("name", CHECKS)
def test_on_two_processes(name: str) -> None:
    """Rows travel by all-to-all between Gloo processes."""
    report(outcomes(), name)
