"""Under any plan, a whole training step leaves the values of torch's own optimizer on one device."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import autoshard
from autoshard import Mesh, NotAvailableError, P
from autoshard.ir.program import Program
from autoshard.runtime.traced_optimizer import describe_update, names_of
from autoshard.runtime.train_step import TrainStep
from autoshard.testing.plans import plans
from autoshard.tracing import trace
from passes.lowering.bucket_updates import BucketUpdates
from tests.benchmarks.live_memory import peak_bytes_of
from tests.end_to_end.layouts import ZERO_3
from tests.end_to_end.training import plain_step, whole
from tests.runtime.processes import on_processes
from tests.samples import examples

MakeOptimizer = Callable[[Iterable[Any]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.2, weight_decay=0.05),
    "nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam": partial(torch.optim.Adam, lr=0.02, weight_decay=0.1, eps=1e-4),
    "adamw": partial(torch.optim.AdamW, lr=0.02, eps=1e-4),
    "amsgrad": partial(torch.optim.AdamW, lr=0.02, amsgrad=True, eps=1e-4),
}
LINE, SQUARE = Mesh({"data": 4}), Mesh({"data": 2, "model": 2})
ZERO_1 = {"[0-9].*": P(), "*:*weight": P("data"), "input:*": P("data")}
STEPS = 3


class Net(nn.Module):
    """A model with odd sizes, a tied weight, a scalar, unused and frozen parameters, and batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 7), nn.Linear(7, 6)
        self.norm = nn.BatchNorm1d(7)
        self.third = nn.Linear(6, 7, bias=False)
        self.third.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(7), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(F.gelu(self.first(x)) * self.frozen)
        return self.scale * self.third(self.second(hidden))


def net(dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def small(width: int = 8, outputs: int = 5) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.GELU(), nn.Linear(width, outputs))


def batch(step: int, dtype: torch.dtype = torch.float32, outputs: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    drawn = torch.randn(16, 6 + outputs, generator=generator, dtype=torch.float64).to(dtype)
    return drawn[:, :6], drawn[:, 6:]


def two_groups(make: MakeOptimizer, model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with biases in a second group, which has other options."""
    named = dict(model.named_parameters())
    biases = [item for name, item in named.items() if name.endswith("bias")]
    others = [item for name, item in named.items() if not name.endswith("bias")]
    return make([{"params": others}, {"params": biases, "lr": 0.01, "weight_decay": 0.0}])


def check_step(
    model: nn.Module,
    plain: nn.Module,
    make: MakeOptimizer,
    mesh: Any,
    *,
    tolerance: float,
    limit: float | None = None,
    outputs: int = 5,
    **options: Any,
) -> TrainStep:
    """Check that three steps with a schedule leave the losses, parameters, buffers and state of one device.

    Return the step.
    """
    optimizer, reference = two_groups(make, model), two_groups(make, plain)
    step = autoshard.compile(model, mesh, optimizer=optimizer, loss_fn=F.mse_loss, max_grad_norm=limit, **options)
    assert isinstance(step, TrainStep)
    assert step.is_traced
    schedules = [torch.optim.lr_scheduler.StepLR(item, 1, 0.7) for item in (optimizer, reference)]
    dtype = next(plain.parameters()).dtype
    for number in range(STEPS):
        x, y = batch(number, dtype, outputs)
        expected = plain_step(plain, reference, x, y, limit=limit, loss_fn=F.mse_loss)
        torch.testing.assert_close(step(x, y), expected, rtol=tolerance, atol=tolerance)
        for schedule in schedules:
            schedule.step()
    assert_same(step, plain, reference, tolerance)
    autoshard.verify(step)
    return step


def assert_same(step: TrainStep, plain: nn.Module, reference: torch.optim.Optimizer, tolerance: float) -> None:
    """Check that parameters, buffers and optimizer state equal one device, in torch's own format."""
    found, expected = step.sharded.state_dict(), plain.state_dict()
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(whole(found[name]), value, rtol=tolerance, atol=tolerance, msg=name)
    mine, theirs = step.optimizer.state_dict(), reference.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    assert mine["state"].keys() == theirs["state"].keys()
    for number, state in theirs["state"].items():
        assert list(mine["state"][number]) == list(state)
        for name, value in state.items():
            tensor = whole(mine["state"][number][name])
            torch.testing.assert_close(tensor, value, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.sample(6)
@pytest.mark.parametrize("foreach", [False, True], ids=["loop", "foreach"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_step_is_that_of_one_device(kind: str, dtype: torch.dtype, foreach: bool) -> None:
    """Each optimizer, with two groups, clipping and a schedule, equals torch's loop and `foreach` versions."""
    make = partial(OPTIMIZERS[kind], foreach=foreach)
    tolerance = 1e-11 if dtype == torch.float64 else 2e-5
    step = check_step(net(dtype), net(dtype), make, SQUARE, tolerance=tolerance, limit=0.3, outputs=7)
    assert len(step.sharded.programs) == 1


@pytest.mark.sample(4)
@pytest.mark.parametrize("constraints", [{}, ZERO_1, ZERO_3], ids=["chosen", "ZeRO-1", "ZeRO-3"])
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_micro_batches_add_up(constraints: dict[str, P], micro_batches: int) -> None:
    """Steps of 1, 2 and 4 micro-batches with clipping equal one device, under the chosen layout and ZeRO."""
    options = {"constraints": constraints, "micro_batches": micro_batches, "limit": 0.5}
    step = check_step(small(), small(), OPTIMIZERS["adamw"], LINE, tolerance=2e-5, **options)
    if constraints is ZERO_1:
        specs = {slot.slot.name: slot.spec for slot in step.sharded.program.phased.lowered.inputs}
        assert specs["0.weight"] == P()
        assert specs["exp_avg:0.weight"] == P("data")


@cache
def program_of(kind: str, limit: float | None) -> Program:
    """Return the traced program of a training step of `net`."""
    model = net()
    update = describe_update(two_groups(OPTIMIZERS[kind], model), names_of(model.named_parameters()), limit)
    return trace(model, batch(0, torch.float64, 7), loss_fn=F.mse_loss, update=update)


@given(st.data())
@examples(4, 8)
def test_any_plan_of_the_step_is_right(data: st.DataObject) -> None:
    """Under any plan, training steps equal one device in float64."""
    kind = data.draw(st.sampled_from(sorted(OPTIMIZERS)))
    mesh = data.draw(st.sampled_from([Mesh({"data": 2}), Mesh({"data": 3}), SQUARE]))
    limit = data.draw(st.sampled_from([None, 0.3]))
    plan = data.draw(plans(program_of(kind, limit), mesh))
    options = {"plan": plan, "limit": limit, "outputs": 7}
    check_step(net(), net(), OPTIMIZERS[kind], mesh, tolerance=1e-11, **options)


def test_state_goes_on_elsewhere() -> None:
    """Torch's optimizer state is loaded into a step, and the step's state into a step of another layout."""
    plain = small()
    reference = OPTIMIZERS["adamw"](plain.parameters())
    for number in range(2):
        plain_step(plain, reference, *batch(number), loss_fn=F.mse_loss)
    steps = []
    for constraints in (ZERO_1, ZERO_3):
        model = small()
        step = autoshard.compile(
            model, LINE, optimizer=OPTIMIZERS["adamw"](model.parameters()), loss_fn=F.mse_loss, constraints=constraints
        )
        step.sharded.load_state_dict(plain.state_dict())
        step.optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
        steps.append(step)
    steps[0](*batch(2))
    steps[1].load_state_dict(copy.deepcopy(steps[0].state_dict()))
    steps[1](*batch(3))
    for number in (2, 3):
        plain_step(plain, reference, *batch(number), loss_fn=F.mse_loss)
    assert_same(steps[1], plain, reference, 2e-5)


def test_changed_options_need_no_other_program() -> None:
    """Learning rate, betas, eps and weight decay may change at each step without a new program."""
    model, plain = small(), small()
    optimizer, reference = (OPTIMIZERS["adamw"](item.parameters()) for item in (model, plain))
    step = autoshard.compile(model, LINE, optimizer=optimizer, loss_fn=F.mse_loss)
    for number in range(4):
        for item in (optimizer, reference):
            item.param_groups[0].update(
                lr=0.01 * (number + 1),
                betas=(0.9 - 0.1 * number, 0.99),
                weight_decay=0.1 * number,
                eps=1e-3 / (number + 1),
            )
        step(*batch(number))
        plain_step(plain, reference, *batch(number), loss_fn=F.mse_loss)
    assert len(step.sharded.programs) == 1
    assert_same(step, plain, reference, 2e-5)


def test_a_parameter_that_joins_later_counts_its_own_steps() -> None:
    """Adam's bias correction counts the steps of each parameter, if some calls leave parameters out."""

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(6, 5), nn.Linear(6, 5)

        def forward(self, x: Tensor, both: bool) -> Tensor:
            return (self.first(x) + (self.second(x) if both else 0)).square().mean()

    model, plain = Branching(), Branching()
    optimizer, reference = (OPTIMIZERS["adam"](item.parameters()) for item in (model, plain))
    step = autoshard.compile(model, LINE, optimizer=optimizer)
    for number, both in enumerate([False, False, True, True, False, True]):
        x, _ = batch(number)
        step(x, both)
        plain_step(plain, reference, x, both)
    assert_same(step, plain, reference, 2e-5)


def test_an_optimizer_that_is_not_traced_takes_its_own_step(caplog: pytest.LogCaptureFixture) -> None:
    """RMSprop, which is not traced, equals one device with a warning in the log, and raises under `strict=True`."""
    model, plain = small(), small()
    optimizer, reference = (torch.optim.RMSprop(item.parameters(), lr=0.01) for item in (model, plain))
    with caplog.at_level(logging.WARNING, "autoshard"):
        step = autoshard.compile(model, LINE, optimizer=optimizer, loss_fn=F.mse_loss)
    assert "RMSprop is none of SGD, Adam, AdamW, Muon, whose updates are traced." in caplog.text
    assert not step.is_traced
    step(*batch(0))
    plain_step(plain, reference, *batch(0), loss_fn=F.mse_loss)
    assert_same(step, plain, reference, 2e-5)
    with pytest.raises(NotAvailableError, match="optimizer=RMSprop is not part of the program"):
        autoshard.compile(model, LINE, optimizer=optimizer, strict=True)


def test_no_gradients_are_left_for_the_next_step() -> None:
    """After a step that failed, and with parameters that the optimizer lacks, norms and values are those of one
    device."""
    model, plain = small(), small()
    optimizer, reference = (torch.optim.RMSprop(item[2].parameters(), lr=0.01) for item in (model, plain))
    step = autoshard.compile(model, LINE, optimizer=optimizer, loss_fn=F.mse_loss, max_grad_norm=0.1)
    with mock.patch.object(optimizer, "step", side_effect=OSError("a full disk")), pytest.raises(OSError, match="full"):
        step(*batch(0))
    for number in (1, 2):
        step(*batch(number))
        plain.zero_grad()
        x, y = batch(number)
        F.mse_loss(plain(x), y).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        reference.step()
        torch.testing.assert_close(step.last_grad_norm, norm)
    assert_same(step, plain, reference, 2e-5)


def test_nothing_to_train_is_said() -> None:
    """A loss that depends on no parameter raises an error that says so."""
    model = small()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    step = autoshard.compile(model, LINE, optimizer=optimizer, loss_fn=lambda outputs, y: (outputs.detach() - y).sum())
    with pytest.raises(autoshard.TraceError, match="nothing that the model or loss_fn= returns depends on a parameter"):
        step(*batch(0))


# On processes.


def check_on_gloo(kind: str, constraints: dict[str, P], micro_batches: int) -> None:
    """Check that steps on processes equal one device, with DTensors that lie as constrained."""
    options = {"constraints": constraints, "micro_batches": micro_batches, "limit": 0.5}
    step = check_step(small(), small(), OPTIMIZERS[kind], LINE, tolerance=2e-5, **options)
    for parameter, state in step.optimizer.state.items():
        assert isinstance(parameter, DTensor)
        assert all(isinstance(item, DTensor) for name, item in state.items() if name != "step")
    weight = step.sharded.get_parameter("0.weight")
    if constraints is ZERO_1:
        assert weight.to_local().shape == (8, 6)
        assert step.optimizer.state[weight]["exp_avg"].to_local().shape == (2, 6)


def check_uneven_on_gloo() -> None:
    """On four processes, sizes that do not divide, a tied weight, scalars and batch statistics equal one device."""
    constraints = {"first.weight": P("data"), "*:first.weight": P(), "input:*": P("data"), "*:second.*": P("data")}
    check_step(
        net(), net(), OPTIMIZERS["amsgrad"], LINE, tolerance=1e-11, limit=0.3, outputs=7, constraints=constraints
    )


def check_state_on_gloo() -> None:
    """A step that loads the state of a step with another layout has the same next losses."""
    steps = []
    for constraints in (ZERO_1, ZERO_3):
        model = small()
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        steps.append(autoshard.compile(model, LINE, optimizer=optimizer, loss_fn=F.mse_loss, constraints=constraints))
    steps[0](*batch(0))
    steps[1].load_state_dict(copy.deepcopy(steps[0].state_dict()))
    for number in (1, 2):
        torch.testing.assert_close(steps[0](*batch(number)), steps[1](*batch(number)), rtol=2e-5, atol=2e-5)


def check_state_made_when_built_on_gloo() -> None:
    """Adagrad, which makes its state when built, equals one device; an Adagrad that has stepped is refused."""
    model, plain = small(), small()
    make = partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.2)
    optimizer, reference = make(model.parameters()), make(plain.parameters())
    constraints = {"*weight": P("data"), "input:*": P("data")}
    step = autoshard.compile(model, LINE, optimizer=optimizer, loss_fn=F.mse_loss, constraints=constraints)
    for number in range(3):
        step(*batch(number))
        plain_step(plain, reference, *batch(number), loss_fn=F.mse_loss)
    assert_same(step, plain, reference, 2e-5)
    stepped = small()
    optimizer = make(stepped.parameters())
    plain_step(stepped, optimizer, *batch(0), loss_fn=F.mse_loss)
    with pytest.raises(autoshard.TraceError, match="optimizer=Adagrad has already taken steps"):
        autoshard.compile(stepped, LINE, optimizer=optimizer, loss_fn=F.mse_loss)


def check_memory_on_gloo() -> None:
    """The measured peak of a step is within 3 % of the predicted peak, under ZeRO-1 and ZeRO-3."""
    for constraints in (ZERO_1, ZERO_3):
        model = small(256, 8)
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        inputs = batch(0, outputs=8)
        step = autoshard.compile(
            model, LINE, optimizer=optimizer, loss_fn=F.mse_loss, constraints=constraints, example_inputs=inputs
        )
        step(*inputs)
        state = [item for kept in optimizer.state.values() for name, item in kept.items() if name != "step"]
        found = peak_bytes_of(partial(step, *inputs), [*step.sharded.parameters(), *state, *inputs])
        predicted = step.plan.predicted.peak_memory_bytes
        assert abs(found / predicted - 1) < 0.03, (constraints, found, predicted)


def check_kernels_on_gloo() -> None:
    """With `backend="triton"`, one launch updates each of two parameter groups, and steps equal one device."""
    for constraints in (ZERO_1, ZERO_3):
        made, right = [], BucketUpdates.__call__

        def record(self: BucketUpdates, graph_module: fx.GraphModule, made: Any = made, right: Any = right) -> Any:
            made.append(right(self, graph_module))
            return made[-1]

        with mock.patch.object(BucketUpdates, "__call__", record):
            options = {"constraints": constraints, "backend": "triton", "limit": 0.5}
            check_step(small(), small(), OPTIMIZERS["adamw"], LINE, tolerance=2e-5, **options)
        (update,) = made
        calls = [str(node.target) for node in update.graph.nodes if "adam" in str(node.target)]
        assert calls == ["autoshard.adam_updates_.default"] * 2  # `check_step` has two groups


def check_inductor_on_gloo() -> None:
    """With `backend="inductor"`, steps equal one device."""
    options = {"constraints": ZERO_1, "backend": "inductor"}
    check_step(small(), small(), OPTIMIZERS["adamw"], LINE, tolerance=2e-5, **options)


CHECKS = {
    **{f"{kind}, chosen": partial(check_on_gloo, kind, {}, 1) for kind in OPTIMIZERS},
    **{f"{kind}, ZeRO-3": partial(check_on_gloo, kind, ZERO_3, 1) for kind in ("momentum", "adam")},
    **{f"adamw, ZeRO-1, {count} parts": partial(check_on_gloo, "adamw", ZERO_1, count) for count in (1, 2)},
    "uneven": check_uneven_on_gloo,
    "state": check_state_on_gloo,
    "state made when built": check_state_made_when_built_on_gloo,
    "memory": check_memory_on_gloo,
    "kernels": check_kernels_on_gloo,
}


_QUICK = ("momentum, ZeRO-3", "adamw, ZeRO-1, 2 parts", "uneven", "state", "memory")

test_on_four_processes = on_processes(CHECKS, deadline_s=500, slow=CHECKS.keys() - _QUICK)


test_inductor_on_four_processes = on_processes({"inductor": check_inductor_on_gloo}, slow=["inductor"])
