"""A plan for a step that returns no gradient norm also runs the step that returns the norm."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import autoshard
from autoshard import Mesh, Options, P, Plan, PlanMismatchError
from autoshard.runtime.traced_optimizer import describe_update, names_of
from autoshard.tracing import trace
from passes.driver.norm_of_plan import lacks_norm, without_norm
from tests.end_to_end.layouts import ZERO_3
from tests.models import Blocks

X = torch.linspace(-1.0, 1.0, 8 * 6).view(8, 6)
SPLIT = {**ZERO_3, "*first.bias": P("model")}


class Net(nn.Module):
    """Two linear layers with a tanh between, and a mean-square loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh()).square().mean()


def step_of(model: nn.Module, mesh: Mesh, **options: object) -> autoshard.TrainStep:
    step = autoshard.compile(model, mesh, optimizer=torch.optim.AdamW(model.parameters()), **options)  # type: ignore[arg-type]
    assert isinstance(step, autoshard.TrainStep)
    return step


def norm_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    model(x).backward()
    return nn.utils.clip_grad_norm_(model.parameters(), 1e9)


@pytest.mark.sample(2)
@pytest.mark.parametrize("options", [{}, {"constraints": SPLIT}, {"constraints": SPLIT, "micro_batches": 2}])
@pytest.mark.parametrize("axes", [{"data": 2, "model": 2}, {"pipeline": 2, "data": 2, "model": 2}])
def test_a_plan_runs_with_the_norm(axes: dict[str, int], options: dict[str, object]) -> None:
    """The step returns the gradient norm of one device, with at most two all-reduces in each update.

    Without stages, all planned nodes keep their specs.
    """
    mesh, given = Mesh(axes), {"micro_batches": 2 if "pipeline" in axes else 1, **options}
    planned = step_of(Net(), mesh, example_inputs=(X,), **given).plan
    assert planned is not None
    step = step_of(Net(), mesh, plan=planned, options=Options(grad_norm=True))
    step(X)
    torch.testing.assert_close(step.last_grad_norm, norm_of(Net(), X))
    autoshard.verify(step)
    assert step.sharded.program is not None
    for part in step.sharded.program.parts:
        targets = [str(node.target) for node in part.update.graph.nodes] if part.update is not None else []
        assert sum("all_reduce" in target for target in targets) <= 2
    if not planned.stages:
        assert step.plan is not None
        assert planned.nodes.items() <= step.plan.nodes.items()


def test_a_plan_without_inner_blocks_runs_with_the_norm() -> None:
    """A plan without a deep model's inner blocks is expanded, and its step returns the gradient norm of one device."""
    mesh, deep = Mesh({"data": 2}), Blocks(8, 12)
    x = torch.linspace(-1.0, 1.0, 64).view(8, 8)
    planned = autoshard.plan(deep, mesh, example_inputs=(x,), optimizer="adamw", precision="f32")
    assert planned.repeats
    step = step_of(deep, mesh, plan=planned, options=Options(on_nonfinite="raise"))
    expected = norm_of(deep, x)
    deep.zero_grad()
    step(x)
    torch.testing.assert_close(step.last_grad_norm, expected)


def test_a_plan_that_clips_has_the_norm() -> None:
    """A plan with `max_grad_norm` runs unchanged with `on_nonfinite`, and its step returns one device's norm."""
    mesh = Mesh({"data": 2})
    options = {"optimizer": "adamw", "max_grad_norm": 0.5, "precision": "f32"}
    planned = autoshard.plan(Net(), mesh, example_inputs=(X,), **options)
    step = step_of(Net(), mesh, plan=planned, max_grad_norm=0.5, options=Options(on_nonfinite="skip"))
    step(X)
    assert step.plan is not None
    assert step.plan.nodes == planned.nodes
    torch.testing.assert_close(step.last_grad_norm, norm_of(Net(), X))


def test_the_program_without_its_norm_is_the_program_before() -> None:
    """A program whose norm is removed has the digest of a program that was traced without a norm."""
    model = Net()
    bare = describe_update(torch.optim.AdamW(model.parameters()), names_of(model.named_parameters()), None)
    program = trace(model, (X,), update=replace(bare, returns_norm=True))
    assert without_norm(program).digest() == trace(model, (X,), update=bare).digest()


def test_a_plan_of_another_optimizer_is_refused() -> None:
    """An SGD plan is refused for an AdamW step that returns the norm."""
    planned = autoshard.plan(Net(), Mesh({"data": 2}), example_inputs=(X,), optimizer="sgd")
    with pytest.raises(PlanMismatchError, match="another model or other inputs, loss or optimizer"):
        step_of(Net(), Mesh({"data": 2}), plan=planned, options=Options(grad_norm=True), example_inputs=(X,))


def test_gradients_that_the_plan_lacks_are_named() -> None:
    """If the norm reads gradients that the plan lacks, the error advises `requires_grad_(False)` for them."""

    def made(**options: object) -> autoshard.TrainStep:
        model = Net()
        optimizer = torch.optim.AdamW(model.first.parameters())
        found = autoshard.compile(model, Mesh({"data": 2}), optimizer=optimizer, example_inputs=(X,), **options)  # type: ignore[arg-type]
        assert isinstance(found, autoshard.TrainStep)
        return found

    planned = made().plan
    assert isinstance(planned, Plan)
    with pytest.raises(PlanMismatchError, match=r"requires_grad_\(False\) on these parameters"):
        made(plan=planned, options=Options(grad_norm=True))


def test_a_program_without_a_norm_lacks_none() -> None:
    """`lacks_norm` is true only for a program that returns its gradient norm and does not clip."""
    model = Net()
    planned = autoshard.plan(model, Mesh({"data": 2}), example_inputs=(X,), optimizer="adamw")
    update = describe_update(torch.optim.AdamW(model.parameters()), names_of(model.named_parameters()), None)
    for item, expected in (
        (update, False),
        (replace(update, max_grad_norm=1.0), False),
        (replace(update, returns_norm=True), True),
    ):
        assert lacks_norm(planned, trace(model, (X,), update=item)) is expected
