"""A loss or gradient that is not finite stops a step on all ranks before its update, under any plan."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import autoshard
from autoshard import Mesh, NonFiniteError, Options
from autoshard.ir.program import Program
from autoshard.runtime import step_check
from autoshard.runtime.stages.stage_meshes import is_elsewhere
from autoshard.runtime.traced_optimizer import describe_update, names_of
from autoshard.testing.plans import plans
from autoshard.tracing import trace
from tests.end_to_end.layouts import PAIR, SQUARE, STAGES, STEP_LAYOUTS, ZERO_3
from tests.end_to_end.training import whole
from tests.models import mixtral
from tests.runtime.processes import on_processes
from tests.samples import examples

OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, lr=0.02, eps=1e-4),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "sgd": partial(torch.optim.SGD, lr=0.1),
}
PLANTED = ("in the batch", "in a gradient", "in the loss")
ROWS = 8


class Net(nn.Module):
    """A model with sizes that ranks do not divide; each input can cause another kind of non-finite number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 7), nn.Linear(7, 6)
        self.scale = nn.Parameter(torch.tensor([1.5, 0.5, -1.0]))

    def forward(self, x: Tensor, roots: Tensor, added: Tensor) -> Tensor:
        """Return a loss; zero `roots` have an infinite derivative, and `added` has no gradient of a parameter."""
        hidden = self.second(self.first(x).tanh()) * self.scale.sum()
        return hidden.square().mean() + (roots * self.scale[0]).abs().sqrt().mean() + added.mean()


def batch(number: int, planted: str = "") -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x, roots, added = torch.randn(ROWS, 6, generator=generator), torch.ones(ROWS, 1), torch.zeros(ROWS, 1)
    if planted == "in the batch":
        x[ROWS - 2, 3] = math.nan
    elif planted == "in a gradient":
        roots[1] = 0.0
    elif planted == "in the loss":
        added[ROWS - 1] = math.inf
    return x, roots, added


def contents(step: Any) -> dict[str, Tensor]:
    """Return whole parameters and optimizer state by name, without those that only other pipeline ranks hold."""
    state = step.optimizer.state_dict()["state"]
    found = {f"{number} {name}": item for number in state for name, item in state[number].items()}
    found |= step.sharded.state_dict()
    return {name: whole(torch.as_tensor(item)) for name, item in found.items() if not is_elsewhere(item)}


def assert_untouched(step: Any, before: dict[str, Tensor]) -> None:
    found = contents(step)
    assert found.keys() <= before.keys()  # the first step gives each pipeline rank its part
    for name, value in found.items():
        assert torch.equal(value.nan_to_num(nan=3.0), before[name].nan_to_num(nan=3.0)), name


def run_planted(step: Any, action: str, planted: str, number: int = 1) -> Tensor | None:
    """Run a step on a batch with a planted non-finite number, and check that it updates nothing.

    Return the loss of the step, or None if it raises.
    """
    before, skipped = contents(step), step.skipped_steps
    loss = None
    if action == "raise":
        with pytest.raises(NonFiniteError, match=r"Step \d+ has loss=.* and a gradient norm of"):
            step(*batch(number, planted))
    else:
        loss = step(*batch(number, planted))
    assert step.skipped_steps == skipped + (action == "skip")
    assert_untouched(step, before)
    return loss


def check(
    make: Callable[..., torch.optim.Optimizer],
    mesh: Mesh,
    *,
    action: str,
    limit: float | None = None,
    planted: tuple[str, ...] = PLANTED,
    **options: Any,
) -> Any:
    """Check that steps with planted non-finite numbers update nothing, and that all other steps equal one device."""
    model, plain = Net(), Net()
    optimizer, reference = make(model.parameters()), make(plain.parameters())
    settings = {"max_grad_norm": limit, "options": Options(on_nonfinite=action), **options}
    step = autoshard.compile(model, mesh, optimizer=optimizer, **settings)
    for number, where in enumerate((planted[0], "", *planted, "")):
        if where:
            loss = run_planted(step, action, where, number)
            assert loss is None or not math.isfinite(loss) or where == "in a gradient"
            assert where == "in the loss" or not math.isfinite(step.last_grad_norm)
            continue
        expected = plain(*batch(number))
        expected.backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), limit or math.inf)
        reference.step()
        reference.zero_grad()
        torch.testing.assert_close(step(*batch(number)), expected.detach())
        torch.testing.assert_close(whole(step.last_grad_norm), norm)
    found = contents(step)
    for name, value in plain.state_dict().items():
        if name in found:
            torch.testing.assert_close(found[name], value, rtol=2e-5, atol=2e-5)
    return step


@cache
def program_of(kind: str, limit: float | None) -> Program:
    """Return the traced program of a step that returns its gradient norm."""
    model = Net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    update = describe_update(optimizer, names_of(model.named_parameters()), limit, returns_norm=True)
    return trace(model, batch(0), update=update)


@given(st.data())
@examples(4, 10)
def test_no_rank_updates_under_any_plan(data: st.DataObject) -> None:
    """Under any plan, a step with a non-finite loss or gradient updates no rank."""
    kind = data.draw(st.sampled_from(sorted(OPTIMIZERS)))
    mesh = data.draw(st.sampled_from([PAIR, Mesh({"data": 3}), SQUARE]))
    limit = data.draw(st.sampled_from([None, 0.3]))
    plan = data.draw(plans(program_of(kind, limit), mesh))
    action, where = data.draw(st.sampled_from(["raise", "skip"])), data.draw(st.sampled_from(PLANTED))
    check(OPTIMIZERS[kind], mesh, action=action, limit=limit, planted=(where,), plan=plan)


@pytest.mark.sample(6)
@pytest.mark.parametrize("limit", [None, 0.3])
@pytest.mark.parametrize("action", ["raise", "skip"])
@pytest.mark.parametrize("layout", STEP_LAYOUTS)
def test_no_rank_updates(layout: str, action: str, limit: float | None) -> None:
    """Under each kind of parallelism, a step with a non-finite loss or gradient updates no rank."""
    mesh, options = STEP_LAYOUTS[layout]
    check(OPTIMIZERS["adamw"], mesh, action=action, limit=limit, **options)


@pytest.mark.parametrize("action", ["raise", "skip"])
def test_an_optimizer_that_is_not_traced_takes_no_step(action: str) -> None:
    """With RMSprop, which is not traced, a non-finite step updates nothing and leaves no gradients."""
    step = check(partial(torch.optim.RMSprop, lr=0.01), SQUARE, action=action, limit=0.3, micro_batches=2)
    assert not step.is_traced
    assert all(parameter.grad is None for parameter in step.sharded.parameters())


def test_experts_are_not_updated() -> None:
    """NaN weights of experts make a training step of a mixture of experts skip its update."""
    model, inputs = mixtral()
    options = Options(on_nonfinite="skip")
    step = autoshard.compile(
        model, Mesh({"expert": 2}), optimizer=torch.optim.AdamW(model.parameters()), options=options
    )
    step(**inputs)
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj.fill_(math.nan)
    before = contents(step)
    step(**inputs)
    assert step.skipped_steps == 1
    assert_untouched(step, before)


def test_without_the_option_nothing_changes() -> None:
    """Without `on_nonfinite`, a step with NaN inputs updates the parameters, and the program computes no norm."""
    model = Net()
    step = autoshard.compile(model, PAIR, optimizer=OPTIMIZERS["adamw"](model.parameters()))
    step(*batch(0, "in the loss"))
    assert "norm norm:all" not in step.plan.outputs
    step(*batch(0, "in the batch"))
    assert not any(parameter.isfinite().all() for parameter in (model.first.weight, model.second.weight))
    assert step.skipped_steps == 0


def test_a_skipped_step_is_no_step_of_the_optimizer() -> None:
    """AdamW's step count leaves out skipped steps, and a learning-rate schedule counts them."""
    model = Net()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    step = autoshard.compile(model, PAIR, optimizer=optimizer, options=Options(on_nonfinite="skip"))
    for number, where in enumerate(["in the batch", "", "in a gradient", ""]):
        step(*batch(number, where))
        schedule.step()
    assert {float(state["step"]) for state in optimizer.state.values()} == {2.0}
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.02 / 16)


# On processes.


def check_one_rank_on_gloo() -> None:
    """If one rank alone reads a NaN gradient norm, all ranks raise one error that names this rank, and none updates."""
    model = Net()
    options = Options(on_nonfinite="raise")
    step = autoshard.compile(
        model,
        Mesh({"data": 4}),
        optimizer=OPTIMIZERS["adamw"](model.parameters()),
        constraints=ZERO_3,
        options=options,
    )
    for number in range(3):  # ranks compare over another channel from the second step on
        step(*batch(number))
        before, right = copy.deepcopy(contents(step)), step_check._read

        def read(loss: Tensor | None, norm: Tensor | None, right: Any = right) -> Any:
            return right(loss, norm if dist.get_rank() != 2 or norm is None else norm * math.nan)

        with mock.patch.object(step_check, "_read", read), pytest.raises(NonFiniteError, match=r"nan on ranks \[2\]"):
            step(*batch(number))
        assert_untouched(step, before)


def check_stages_on_gloo() -> None:
    """Pipeline ranks with and without the stage of the loss skip the same non-finite steps."""
    check(OPTIMIZERS["adamw"], STAGES, action="skip", limit=0.3, micro_batches=2)


CHECKS = {"one rank": check_one_rank_on_gloo, "stages": check_stages_on_gloo}

test_on_gloo = on_processes(CHECKS, deadline_s=300, slow=["stages"])
