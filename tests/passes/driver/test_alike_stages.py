"""Pipeline stages of equal structure are planned once. A stage of many equal blocks is planned with a few of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import autoshard
from autoshard import Mesh, Plan, Recipe
from passes.driver import stage_search
from passes.driver.planner import Planner
from tests.passes.deep import alike

BATCH, MICRO_BATCHES, STEPS = 16, 4, 3


def skips(layers: int) -> nn.Module:
    """Blocks that all read the first value, which therefore crosses all stages."""

    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(16, 16)
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(layers)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = x = self.first(x)
            for layer in self.layers:
                x = x + layer(x + first)
            return x.square().mean()

    return Skips()


MODELS: dict[str, Callable[[int], nn.Module]] = {"chain": lambda layers: alike(layers), "skips": skips}


def inputs() -> torch.Tensor:
    return torch.randn(BATCH, 4, 16, generator=torch.Generator().manual_seed(1))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def planned(model: nn.Module, mesh: Mesh, **options: Any) -> Plan:
    recipe = Recipe(micro_batch=BATCH // MICRO_BATCHES // dict(mesh.axes).get("data", 1))
    asked: dict[str, Any] = {"precision": None, "max_grad_norm": 0.3, "recipe": recipe, **options}
    return autoshard.plan(model, mesh, example_inputs=(inputs(),), optimizer=optimizer_of(model), **asked)


def check_runs(model: nn.Module, plan: Plan) -> None:
    """Check losses and parameters of a few steps against one device."""
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    losses, optimizer = [], optimizer_of(model)
    for _ in range(STEPS):
        loss = model(inputs())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    after = {name: value.detach().clone() for name, value in model.named_parameters()}
    model.load_state_dict(state)
    step = autoshard.compile(model, plan.mesh, optimizer=optimizer_of(model), max_grad_norm=0.3, plan=plan)
    for loss in losses:
        torch.testing.assert_close(step(inputs()), loss)
    for name, value in model.named_parameters():
        found = value.full_tensor() if isinstance(value, DTensor) else value
        torch.testing.assert_close(found.detach(), after[name], rtol=1e-5, atol=1e-5)


@pytest.mark.sample(2)
@pytest.mark.parametrize("schedule", ["1F1B", "InterleavedZeroBubble"])
@pytest.mark.parametrize("name", MODELS)
def test_alike_stages_have_the_plans_that_each_has_alone(
    name: str, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages of equal structure are planned once, and get the plans of stages that are planned one by one."""
    torch.manual_seed(0)
    model, mesh = MODELS[name](6), Mesh({"pipeline": 6 if schedule == "1F1B" else 2, "data": 2})
    virtual = 1 if schedule == "1F1B" else 3
    recipe = Recipe(micro_batch=BATCH // MICRO_BATCHES // 2, schedule=schedule, virtual_stages=virtual)
    searched = list[int]()
    search = Planner.search_and_lower
    monkeypatch.setattr(Planner, "search_and_lower", lambda *given: searched.append(1) or search(*given))
    once = planned(model, mesh, recipe=recipe)
    number, numbers = len(searched), count()
    monkeypatch.setattr(stage_search, "stage_key", lambda *_: str(next(numbers)))
    each = planned(model, mesh, recipe=recipe)
    assert number < len(once.stages) == len(searched) - number
    strip = {"search_time_s": 0.0, "formulas": None, "alternatives": None, "baselines": {}}
    for one, other in zip(once.stages, each.stages, strict=True):
        assert replace(one, **strip) == replace(other, **strip)
    assert replace(once, stages=(), **strip) == replace(each, stages=(), **strip)
    check_runs(model, once)


def test_long_stages_are_planned_by_a_few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan made with a few blocks of each stage has all parameters and nodes, and trains as one device does.

    Its step is at most 1 % longer than that of a plan made with all blocks.
    """
    torch.manual_seed(0)
    model, mesh = alike(18), Mesh({"pipeline": 2, "data": 2})
    sizes = list[int]()
    search = Planner.search_and_lower

    def noted(planner: Planner, program: Any, *others: Any) -> Any:
        sizes.append(len(program.graph.nodes))
        return search(planner, program, *others)

    monkeypatch.setattr(Planner, "search_and_lower", noted)
    short = planned(model, mesh)
    few = max(sizes)
    sizes.clear()
    monkeypatch.setattr(stage_search, "leave_out_units", lambda *_: None)
    whole = planned(model, mesh)
    assert few < 0.7 * min(sizes)
    assert {*short.parameters} == {*whole.parameters}
    assert [len(stage.nodes) for stage in short.stages] == [len(stage.nodes) for stage in whole.stages]
    assert short.predicted.step_time_s <= 1.01 * whole.predicted.step_time_s
    check_runs(model, short)
