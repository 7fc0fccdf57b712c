"""Training in float16 scales the loss as `torch.amp.GradScaler` does on one device, under any plan."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import autoshard
from autoshard import LossScaling, Mesh, NonFiniteError, NotAvailableError, Options, P, VerificationError
from autoshard.ir.program import InputKind, Program
from autoshard.runtime.stages.stage_meshes import is_elsewhere
from autoshard.runtime.traced_optimizer import describe_update, names_of
from autoshard.runtime.train_step import TrainStep
from autoshard.testing import plans
from autoshard.tracing import trace
from autoshard.tracing.precision import run_in_precision
from passes.verification.verify_program import verify_program
from tests.end_to_end.drawn_pairs import any_plan_of_a_step_in_f16
from tests.end_to_end.layouts import PAIR, SQUARE, STAGES, STEP_LAYOUTS, ZERO_3
from tests.end_to_end.training import whole
from tests.models import gpt2
from tests.runtime.processes import on_processes
from tests.samples import examples

F16 = torch.float16
JUMPS = LossScaling(init_scale=2.0**60, growth_factor=2.0**50, backoff_factor=2.0**-50, growth_interval=2)
"""Scaling whose scale is 2^10, at which nothing overflows, or 2^60, at which all does; rounding decides nothing."""
SCALES = [2.0**60, *[2.0**10, 2.0**10, 2.0**60] * 3]

MakeOptimizer = Callable[[Iterable[Any]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw": partial(torch.optim.AdamW, lr=0.02, eps=0.1),  # a small epsilon divides rounding by its own size
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "sgd": partial(torch.optim.SGD, lr=0.1),
}
STEPS = 7


class Net(nn.Module):
    """A model with sizes that ranks do not divide, and a parameter without dims."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 7), nn.Linear(7, 6)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.rest = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.second(self.first(x).tanh() * self.scale)
        return F.mse_loss((hidden + self.rest(hidden)).float(), y.float())


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 6, generator=generator)


class Alone:
    """Training on one device with a compiled step's casts and torch's own `GradScaler`."""

    def __init__(
        self,
        model: nn.Module,
        make: MakeOptimizer,
        scaling: LossScaling,
        limit: float | None = None,
        call: Callable[..., Any] | None = None,
    ) -> None:
        self.model, self.optimizer, self.limit = model, make(model.parameters()), limit
        self.scaler = torch.amp.GradScaler("cpu", **dataclasses.asdict(scaling))
        self.call = call or partial(run_in_precision, model, F16)

    def __call__(self, *args: Any, parts: int = 1, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Run a step of `parts` micro-batches; return the mean loss and the unscaled gradient norm."""
        losses = []
        for part in zip(*(item.chunk(parts) for item in args), strict=True) if args else [()]:
            found = self.call(*part, **kwargs)
            losses.append(found if isinstance(found, Tensor) else found["loss"])
            self.scaler.scale(losses[-1] / parts).backward()
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.limit or math.inf)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return torch.stack(losses).mean().detach(), norm


def check(
    make: MakeOptimizer,
    mesh: Any,
    *,
    limit: float | None = None,
    steps: int = STEPS,
    micro_batches: int = 1,
    **options: Any,
) -> TrainStep:
    """Check that losses, norms, scales, skipped steps and parameters equal those of one device with `GradScaler`."""
    model, alone = Net(), Alone(Net(), make, JUMPS, limit)
    arguments = {"max_grad_norm": limit, "precision": "f16", "options": Options(loss_scaling=JUMPS), **options}
    step = autoshard.compile(model, mesh, optimizer=make(model.parameters()), micro_batches=micro_batches, **arguments)
    assert isinstance(step, TrainStep)
    for number in range(steps):
        assert step.loss_scale == alone.scaler.get_scale() == SCALES[number]
        loss, norm = alone(*batch(number), parts=micro_batches)
        torch.testing.assert_close(whole(step(*batch(number))), loss, rtol=2e-3, atol=0)
        assert norm.isfinite() == whole(step.last_grad_norm).isfinite() == (SCALES[number] < 2**60)
        if norm.isfinite():
            torch.testing.assert_close(whole(step.last_grad_norm), norm, rtol=4e-3, atol=0)
    assert step.skipped_steps == SCALES[:steps].count(2.0**60)
    held = {name: item for name, item in step.sharded.state_dict().items() if not is_elsewhere(item)}
    for name, value in alone.model.state_dict().items():
        if name in held:
            torch.testing.assert_close(whole(held[name]), value, rtol=2e-3, atol=2e-3)
    autoshard.verify(step)
    return step


def counts_of(optimizer: torch.optim.Optimizer) -> set[float]:
    return {float(state["step"]) for state in optimizer.state.values()}


GROWING = LossScaling(init_scale=2.0**20, growth_interval=4)
"""Scaling whose scale rises until some gradients overflow; rounding decides at which step."""


@pytest.mark.parametrize("scaling", [replace(JUMPS, growth_interval=6), GROWING], ids=["jumps", "growing"])
@pytest.mark.parametrize("steps", [30, pytest.param(200, marks=pytest.mark.slow)])
def test_gpt2_trains_as_with_a_scaler(scaling: LossScaling, steps: int) -> None:
    """GPT-2's scales, skipped steps and losses equal `GradScaler`'s on one device, also with torch's `autocast`.

    `autocast` normalises in float32, and does not cast the residual stream. So its largest gradient may overflow a few
    steps before or after ours, and losses differ by the progress of these steps. Scales are equal where rounding
    decides nothing.
    """
    model, example = gpt2()
    make = partial(torch.optim.AdamW, lr=1e-3, eps=1e-4)
    generator = torch.Generator().manual_seed(0)
    alone, by_torch = copy.deepcopy(model), copy.deepcopy(model)

    def autocast(**kwargs: Any) -> Any:
        with torch.autocast("cpu", F16):
            return by_torch(**kwargs)

    runs = [Alone(alone, make, scaling, 1.0), Alone(by_torch, make, scaling, 1.0, autocast)]
    options = {"max_grad_norm": 1.0, "precision": "f16", "options": Options(loss_scaling=scaling)}
    step = autoshard.compile(model, PAIR, optimizer=make(model.parameters()), **options)
    scales = []
    for _ in range(steps):
        scales.append(step.loss_scale)
        tokens = torch.randint(0, 32, example["input_ids"].shape, generator=generator)
        inputs = {**example, "input_ids": tokens, "labels": tokens}
        loss, norm = step(**inputs), step.last_grad_norm
        for run in runs:
            ratio = run.scaler.get_scale() / scales[-1]
            assert ratio == 1 if scaling is not GROWING else 0.25 <= ratio <= 4
            expected, their_norm = run(**inputs)
            torch.testing.assert_close(loss, expected, rtol=1e-2 if scaling is GROWING else 5e-4, atol=0)
            assert scaling is GROWING or norm.isfinite() == their_norm.isfinite()
    assert step.skipped_steps == sum(later < scale for scale, later in pairwise([*scales, step.loss_scale]))
    assert step.skipped_steps >= steps // 12
    assert len(set(scales)) > 1


@cache
def program_of(kind: str, limit: float | None) -> Program:
    """Return the traced program of a training step in float16, with an optimizer of `OPTIMIZERS`."""
    model = Net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    update = describe_update(optimizer, names_of(model.named_parameters()), limit, scales_loss=True)
    return trace(model, batch(0), update=update, compute_dtype=F16)


@given(st.data())
@examples(4, 8)
def test_any_plan_skips_the_same_steps(data: st.DataObject) -> None:
    """Under any plan of a float16 step, losses, scales and skipped steps equal one device with `GradScaler`."""
    kind = data.draw(st.sampled_from(sorted(OPTIMIZERS)))
    mesh = data.draw(st.sampled_from([PAIR, Mesh({"data": 3}), SQUARE]))
    limit = data.draw(st.sampled_from([None, 0.3]))
    plan = data.draw(plans(program_of(kind, limit), mesh, precision="f16"))
    check(OPTIMIZERS[kind], mesh, limit=limit, steps=4, plan=plan, precision=None)


@pytest.mark.slow
@given(st.data())
@examples(4, 8)
def test_drawn_programs_train_in_float16(data: st.DataObject) -> None:
    """Drawn models with drawn optimizers and plans train as one device with torch's scaler."""
    any_plan_of_a_step_in_f16(data)


@pytest.mark.sample(6)
@pytest.mark.parametrize("limit", [None, 0.3])
@pytest.mark.parametrize("layout", STEP_LAYOUTS)
def test_each_layout_skips_the_same_steps(layout: str, limit: float | None) -> None:
    """Under every kind of parallelism, float16 steps equal one device, and AdamW counts only steps not skipped."""
    mesh, options = STEP_LAYOUTS[layout]
    step = check(OPTIMIZERS["adamw"], mesh, limit=limit, **options)
    assert step.is_traced
    assert counts_of(step.optimizer) == {float(STEPS - step.skipped_steps)}


def test_an_optimizer_that_is_not_traced_is_scaled_too() -> None:
    """Float16 training with RMSprop, which is not traced, equals one device with `GradScaler`."""
    step = check(partial(torch.optim.RMSprop, lr=0.01, eps=1e-3), SQUARE, limit=0.3, micro_batches=2)
    assert not step.is_traced
    assert all(parameter.grad is None for parameter in step.sharded.parameters())


@pytest.mark.parametrize("kind", ["traced", "its own step"])
def test_a_last_batch_of_fewer_samples_has_the_same_scale(kind: str) -> None:
    """A last batch with fewer samples, run in several rounds before one update, keeps the scale of one device."""
    make = OPTIMIZERS["adamw"] if kind == "traced" else partial(torch.optim.RMSprop, lr=0.01, eps=1e-3)
    model, alone = Net(), Alone(Net(), make, JUMPS)
    options = {"precision": "f16", "options": Options(loss_scaling=JUMPS), "micro_batches": 2}
    step = autoshard.compile(model, PAIR, optimizer=make(model.parameters()), **options)
    dataset = [sample for number in range(2) for sample in zip(*batch(number), strict=True)][:13]
    for number, rows in enumerate([*autoshard.data.loader(dataset, step, batch_size=8, shuffle=False)] * 2):
        first = 8 * (number % 2)
        samples = [torch.stack(items) for items in zip(*dataset[first : first + 8], strict=True)]
        assert step.loss_scale == alone.scaler.get_scale() == SCALES[number]
        torch.testing.assert_close(step(*rows), alone(*samples)[0], rtol=2e-3, atol=0)
    for name, value in alone.model.state_dict().items():
        torch.testing.assert_close(step.sharded.state_dict()[name], value, rtol=2e-3, atol=2e-3)


def test_gradients_from_before_a_step_are_not_scaled() -> None:
    """A float16 step adds its unscaled gradients to those that parameters had before."""
    model, optimizer = Net(), OPTIMIZERS["sgd"]
    plain = copy.deepcopy(model)
    step = autoshard.compile(model, PAIR, optimizer=optimizer(model.parameters()), precision="f16")
    reference = optimizer(plain.parameters())
    for parameter, other in zip(step.sharded.parameters(), plain.parameters(), strict=True):
        parameter.grad, other.grad = torch.ones_like(parameter), torch.ones_like(other)
    step(*batch(0))
    run_in_precision(plain, F16, *batch(0)).backward()
    reference.step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(whole(step.sharded.state_dict()[name]), value, rtol=1e-3, atol=1e-4)


def test_a_step_has_the_scale_of_the_next_step() -> None:
    """A new float16 step has `GradScaler`'s initial scale, and a bfloat16 step has none."""
    model = Net()
    step = autoshard.compile(model, PAIR, optimizer=OPTIMIZERS["sgd"](model.parameters()), precision="f16")
    assert step.loss_scale == torch.amp.GradScaler("cpu").get_scale()
    assert "loss_scale=65536" in step.sharded.agreement.describe_hyperparameters()
    model = Net()
    step = autoshard.compile(model, PAIR, optimizer=OPTIMIZERS["sgd"](model.parameters()), precision="bf16")
    assert step.loss_scale is None
    assert "loss_scale" not in step.sharded.agreement.describe_hyperparameters()


@pytest.mark.parametrize("mesh", [PAIR, STAGES], ids=["one stage", "two stages"])
def test_a_plan_of_a_float16_step_runs(mesh: Mesh) -> None:
    """A plan of a float16 step names its precision, unscales gradients, and trains as one device."""
    model = Net()
    plan = autoshard.plan(model, mesh, example_inputs=batch(0), optimizer="adamw", precision="f16")
    assert "in f16" in str(plan)
    assert "unscale" in str(plan.to_json())
    check(OPTIMIZERS["adamw"], mesh, steps=4, micro_batches=plan.micro_batches, plan=plan, precision=None)


@pytest.mark.parametrize("limit", [None, 0.3])
def test_a_program_that_keeps_the_scale_is_refused(limit: float | None) -> None:
    """A program that uses the scale instead of its inverse, in any one place, is not verified."""
    model = Net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    options = {"max_grad_norm": limit, "precision": "f16", "constraints": {"input:*": P("data")}}
    step = autoshard.compile(model, PAIR, optimizer=optimizer, example_inputs=batch(0), **options)
    lowered = step.sharded.program.phased.lowered
    verify_program(lowered.traced, lowered)
    placeholders = lowered.graph_module.graph.find_nodes(op="placeholder")
    scalars = {slot.slot.kind: node for slot, node in zip(lowered.inputs, placeholders, strict=True)}
    inverse, scale = scalars[InputKind.UNSCALE], scalars[InputKind.TANGENT]
    for user in list(inverse.users):
        user.replace_input_with(inverse, scale)
        with pytest.raises(VerificationError):
            verify_program(lowered.traced, lowered)
        user.replace_input_with(scale, inverse)
    verify_program(lowered.traced, lowered)


def saved(mesh: Mesh, folder: Path, steps: Iterable[int], **options: Any) -> tuple[TrainStep, dict[str, Tensor]]:
    """Train for some steps from the latest checkpoint, and save after each; return the step and its parameters."""
    model = Net()
    step = autoshard.compile(
        *(model, mesh),
        optimizer=OPTIMIZERS["adamw"](model.parameters()),
        precision="f16",
        example_inputs=batch(0),
        options=Options(loss_scaling=JUMPS),
        **options,
    )
    checkpoints = autoshard.Checkpoints(folder, asynchronous=False)
    checkpoints.load(step)
    for number in steps:
        assert step.loss_scale == SCALES[number]
        step(*batch(number))
        checkpoints.save(step, at=number + 1)
    return step, {name: whole(item) for name, item in step.sharded.state_dict().items()}


@pytest.mark.parametrize("mesh", [SQUARE, STAGES], ids=["square", "stages"])
def test_a_checkpoint_has_the_scale(mesh: Mesh, tmp_path: Path) -> None:
    """Training resumed from a checkpoint on another mesh continues with the saved scale, as a run without a stop."""
    parts = {"micro_batches": 2} if mesh is STAGES else {}
    saved(PAIR, tmp_path / "two runs", range(2))
    _, found = saved(mesh, tmp_path / "two runs", range(2, 5), **parts)
    _, expected = saved(PAIR, tmp_path / "one run", range(5))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=2e-3, atol=2e-3)


def test_a_checkpoint_of_another_precision_loads(tmp_path: Path) -> None:
    """A checkpoint without a scale leaves a step's scale as it is, and a step without scaling ignores a saved scale."""
    model = Net()
    step = autoshard.compile(model, PAIR, optimizer=OPTIMIZERS["adamw"](model.parameters()), example_inputs=batch(0))
    checkpoints = autoshard.Checkpoints(tmp_path, asynchronous=False)
    checkpoints.save(step, at=0)
    narrow, _ = saved(PAIR, tmp_path, range(1))
    assert checkpoints.load(step) == 1
    assert narrow.loss_scale == SCALES[1]


def test_a_state_dict_is_that_of_a_scaler() -> None:
    """A step loads the state dict of a `GradScaler`, and a `GradScaler` loads that of a step."""
    alone = Alone(Net(), OPTIMIZERS["adamw"], JUMPS)
    for number in range(2):
        alone(*batch(number))
    model = Net()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    step = autoshard.compile(
        model, PAIR, optimizer=optimizer, precision="f16", options=Options(loss_scaling=JUMPS), example_inputs=batch(0)
    )
    step.load_state_dict({**step.state_dict(), "loss_scale": alone.scaler.state_dict()})
    assert step.state_dict()["loss_scale"] == alone.scaler.state_dict()
    step(*batch(2))
    assert step.loss_scale == SCALES[3]
    alone.scaler.load_state_dict(step.state_dict()["loss_scale"])
    assert alone.scaler.get_scale() == SCALES[3]
    with pytest.raises(NotAvailableError, match=r"The state of the loss scale has \['factor'\], without 'scale'"):
        step.load_state_dict({**step.state_dict(), "loss_scale": {"factor": 1.0}})


def overflowing(action: str | None, scale: float) -> TrainStep:
    """Return a training step with a given initial scale and `on_nonfinite` action."""
    model = Net()
    options = Options(loss_scaling=LossScaling(init_scale=scale), on_nonfinite=action)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    return autoshard.compile(model, PAIR, optimizer=optimizer, precision="f16", options=options)


def test_an_overflow_is_no_error() -> None:
    """With `on_nonfinite="raise"`, overflowing gradients halve the scale, and a NaN loss raises."""
    step = overflowing("raise", 2.0**40)
    step(*batch(0))
    assert (step.loss_scale, step.skipped_steps) == (2.0**39, 1)
    x, y = batch(0)
    with pytest.raises(NonFiniteError, match="has loss=nan"):
        step(x, y * math.nan)
    assert (step.loss_scale, step.skipped_steps) == (2.0**39, 1)


def test_gradients_that_overflow_without_a_scale_are_an_error() -> None:
    """At scale 1, overflowing gradients raise if `on_nonfinite="raise"`, and halve the scale otherwise."""
    x, y = batch(0)
    with pytest.raises(NonFiniteError, match="a gradient norm of"):
        overflowing("raise", 1.0)(x, y * 1e9)
    step = overflowing(None, 1.0)
    step(x, y * 1e9)
    assert step.loss_scale == 0.5


def test_a_loss_that_is_not_finite_may_leave_the_scale() -> None:
    """With `on_nonfinite="skip"`, a NaN loss halves the scale and counts as one skipped step."""
    step = overflowing("skip", 2.0**10)
    x, y = batch(0)
    step(x, y * math.nan)
    assert (step.loss_scale, step.skipped_steps) == (2.0**9, 1)


def test_float16_is_refused_without_a_training_step() -> None:
    """Float16 without a training step is refused if gradients are needed, and runs under `no_grad`."""
    model, inputs = Net(), batch(0)
    sharded = autoshard.compile(model, PAIR, precision="f16")
    with torch.no_grad():
        assert sharded.eval()(*inputs).dtype is torch.float32
    message = r"precision='f16' with gradients needs a training step, which scales the loss.* Pass optimizer="
    with pytest.raises(NotAvailableError, match=message):
        sharded(*inputs)
    with pytest.raises(NotAvailableError, match=message):
        autoshard.plan(model, PAIR, precision="f16", example_inputs=inputs)
    step = overflowing(None, 1.0)
    step(*inputs)
    with pytest.raises(NotAvailableError, match=message):
        step.sharded(*inputs)


def test_settings_belong_to_float16() -> None:
    """`loss_scaling` is refused without float16, without a training step, and if it is a number."""
    model, options = Net(), Options(loss_scaling=JUMPS)
    with pytest.raises(NotAvailableError, match=r"loss_scaling=LossScaling\(.*belongs to precision='f16', and the"):
        autoshard.compile(model, PAIR, optimizer=OPTIMIZERS["sgd"](model.parameters()), options=options)
    with pytest.raises(NotAvailableError, match=r"loss_scaling=LossScaling\(.*belongs to a training step"):
        autoshard.compile(model, PAIR, precision="f16", options=options)
    with pytest.raises(NotAvailableError, match=r"loss_scaling=1024 is a int; pass an autoshard\.LossScaling"):
        Options(loss_scaling=1024)  # type: ignore[arg-type]


# On processes.


def check_zero_3_on_gloo() -> None:
    """With ZeRO-3, clipping and micro-batches on two processes, float16 steps equal one device."""
    check(OPTIMIZERS["adamw"], PAIR, limit=0.3, micro_batches=2, constraints=ZERO_3)


def check_stages_on_gloo() -> None:
    """Two pipeline stages, of which one computes the loss, skip the same steps as one device."""
    check(OPTIMIZERS["adamw"], Mesh({"pipeline": 2}), limit=0.3, micro_batches=2)


CHECKS = {"ZeRO-3": check_zero_3_on_gloo, "stages": check_stages_on_gloo}

test_on_gloo = on_processes(CHECKS, ranks=2, deadline_s=300)
