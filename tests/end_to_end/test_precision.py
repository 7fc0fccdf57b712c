"""Mixed precision on any mesh equals one device with the same casts, and keeps float32 master weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import autoshard
from autoshard import Cluster, Mesh, NotAvailableError, P, PlanMismatchError
from autoshard.runtime.train_step import TrainStep
from autoshard.testing import check_plan, plans, programs
from autoshard.tracing.precision import run_in_precision
from tests.end_to_end.layouts import PAIR, SQUARE, ZERO_1, ZERO_3
from tests.end_to_end.training import whole
from tests.models import MODELS
from tests.runtime.processes import on_processes

BF16 = torch.bfloat16
LINE = Mesh({"data": 4})
STEPS = 3

MakeOptimizer = Callable[[Iterable[Any]], torch.optim.Optimizer]
ADAMW = partial(torch.optim.AdamW, lr=0.02, eps=1e-4)
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Net(nn.Module):
    """A model with a tied weight, a frozen parameter, a norm, and a float32 buffer added to bfloat16 values."""

    def __init__(self, parts: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 12, bias=False), nn.Linear(12, 8)
        self.norm = nn.BatchNorm1d(12) if parts == 1 else nn.LayerNorm(12)
        self.layer_norm = nn.LayerNorm(8)
        self.third = nn.Linear(8, 12, bias=False)
        self.third.weight = self.first.weight
        self.frozen = nn.Parameter(torch.linspace(0.5, 1.5, 12), requires_grad=False)
        self.register_buffer("offsets", torch.linspace(-1, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.norm(self.first(x)) * self.frozen)
        return self.third(self.layer_norm(self.second(hidden) + self.offsets))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(16, 8, generator=generator), torch.randn(16, 12, generator=generator)


def changes(model: nn.Module, before: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return how much parameters and buffers changed since `before`; whole values would hide small differences."""
    return {name: whole(value).double() - before[name].double() for name, value in model.state_dict().items()}


def train_alone(make: MakeOptimizer, dtype: torch.dtype, parts: int = 1) -> dict[str, Tensor]:
    """Return losses and changes of parameters after three steps of plain PyTorch on one device in `dtype`."""
    model = Net(parts)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = make(model.parameters())
    found = {}
    for step in range(STEPS):
        losses = []
        for x, y in zip(*(item.chunk(parts) for item in batch(step)), strict=True):
            loss = F.mse_loss(run_in_precision(model, dtype, x).float(), y)
            (loss / parts).backward()
            losses.append(loss.detach())
        found[f"loss {step}"] = torch.stack(losses).mean()
        optimizer.step()
        optimizer.zero_grad()
    return found | changes(model, before)


def check_step(make: MakeOptimizer, mesh: Any, parts: int = 1, **options: Any) -> TrainStep:
    """Check that losses and changes of parameters equal one device in bfloat16 but for rounding; return the step.

    The allowed difference is a few times the difference between bfloat16 and float32 on one device. A mesh rounds the
    same values to the same type, and rounds once more for each part of a sum.
    """
    model = Net(parts)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    step = autoshard.compile(
        model, mesh, optimizer=make(model.parameters()), loss_fn=F.mse_loss, micro_batches=parts, **options
    )
    assert isinstance(step, TrainStep)
    found = {f"loss {number}": whole(step(*batch(number))) for number in range(STEPS)} | changes(step.sharded, before)
    narrow, exact = train_alone(make, BF16, parts), train_alone(make, torch.float32, parts)
    assert list(found) == list(narrow)
    for name, expected in narrow.items():
        scale = float(expected.abs().max())
        allowed = torch.finfo(BF16).eps * scale + 4 * float((expected - exact[name]).abs().max())
        assert float((found[name] - expected).abs().max()) <= allowed, name
        assert allowed < 0.5 * scale or scale == 0, f"{name} is not told apart from noise"
    kept = [*step.sharded.parameters(), *(item for state in step.optimizer.state.values() for item in state.values())]
    assert {item.dtype for item in kept} == {torch.float32}
    assert found["loss 0"].dtype is torch.float32
    autoshard.verify(step)
    return step


@pytest.mark.sample(3)
@pytest.mark.parametrize("constraints", [{}, ZERO_1, ZERO_3], ids=["chosen", "ZeRO-1", "ZeRO-3"])
@pytest.mark.parametrize("make", [ADAMW, MOMENTUM], ids=["adamw", "momentum"])
def test_a_step_equals_one_device(make: MakeOptimizer, constraints: dict[str, P]) -> None:
    """In bfloat16, losses, master weights and buffers equal one device, under the chosen layout and ZeRO."""
    check_step(make, LINE, precision="bf16", constraints=constraints)


def test_micro_batches_add_up_in_float32() -> None:
    """In bfloat16 with two micro-batches, gradients are summed in float32, and steps equal one device."""
    step = check_step(ADAMW, PAIR, 2, precision="bf16", constraints={"input:*": P("data")})
    phased = step.sharded.program.phased
    nodes = {node.name: node for node in phased.lowered.graph_module.graph.nodes}
    assert {nodes[name].meta["val"].dtype for name in phased.carried} == {torch.float32}


def test_an_optimizer_that_takes_its_own_step() -> None:
    """With RMSprop, which is not traced, bfloat16 steps equal one device, and parameters and state are float32."""
    step = check_step(partial(torch.optim.RMSprop, lr=0.01, eps=1e-3), PAIR, precision="bf16")
    assert not step.is_traced


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "mesh"), [("gpt2", SQUARE), ("llama", PAIR)])
def test_models_equal_one_device(name: str, mesh: Mesh) -> None:
    """GPT-2 and Llama in bfloat16 equal one device over two steps, with a tolerance below real errors."""
    model, inputs = MODELS[name]()
    plan = autoshard.plan(model, mesh, example_inputs=inputs, constraints={"input:*": P("data")})
    assert plan.precision == "bf16"
    found = check_plan(model, mesh, inputs, plan=plan, steps=2)
    found.raise_if_different()
    assert found.tolerance == torch.finfo(BF16).eps
    for item in found.comparisons:  # a mean taken for a sum, say, is told from rounding
        wrong = replace(item, difference=0.5 * item.scale)
        assert item.scale < 1e-4 or not wrong.is_close(found.tolerance), item


@given(st.data())
@settings(max_examples=3)
def test_any_legal_plan_equals_one_device(data: st.DataObject) -> None:
    """Under any plan in bfloat16, a drawn program equals one device."""
    mesh = data.draw(st.sampled_from([PAIR, SQUARE, Mesh({"data": 3})]))
    program = data.draw(programs())
    plan = data.draw(plans(program, mesh, precision="bf16"))
    check_plan(program.model, mesh, program.inputs, plan=plan).raise_if_different()


def test_dropout_is_the_same_on_any_mesh() -> None:
    """In bfloat16, losses with dropout on four ranks equal those on one rank with the same seed."""
    losses = []
    for mesh in (Mesh({"data": 1}), SQUARE):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.4), nn.Linear(16, 12))
        optimizer = ADAMW(model.parameters())
        step = autoshard.compile(model, mesh, optimizer=optimizer, loss_fn=F.mse_loss, precision="bf16")
        losses.append([step(*batch(number)) for number in range(2)])
    torch.testing.assert_close(losses[1], losses[0], rtol=torch.finfo(BF16).eps, atol=0)


def test_evaluation_computes_in_the_same_precision() -> None:
    """Evaluation in bfloat16 returns bfloat16 outputs as one device does, and a float32 loss."""
    model = Net().eval()
    sharded = autoshard.compile(model, PAIR, precision="bf16")
    x, _ = batch(0)
    with torch.no_grad():
        found, expected = sharded(x), run_in_precision(model, BF16, x)
    assert sharded.plan.precision == "bf16"
    assert found.dtype is BF16
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-6)
    model, inputs = MODELS["llama"]()
    with torch.no_grad():
        assert autoshard.compile(model.eval(), PAIR, precision="bf16")(**inputs)["loss"].dtype is torch.float32


def test_a_plan_carries_its_precision(tmp_path: Path) -> None:
    """A saved plan keeps its precision, and `compile` with another precision raises."""
    model, inputs = Net(), batch(0)
    options = {"example_inputs": inputs, "loss_fn": F.mse_loss}
    made = autoshard.plan(model, PAIR, optimizer="adamw", **options)
    assert "in bf16" in str(made)
    made.save(tmp_path / "plan.json")
    step = autoshard.compile(model, PAIR, optimizer=ADAMW(model.parameters()), plan=tmp_path / "plan.json", **options)
    assert step.plan.precision == "bf16"
    assert step.plan.program_digest == made.program_digest
    with pytest.raises(PlanMismatchError, match=r"in precision='bf16', and precision='f32' is asked for"):
        autoshard.compile(model, PAIR, plan=made, precision="f32")
    own = autoshard.plan(model, PAIR, precision=None, **options)
    assert own.precision is None
    assert autoshard.compile(model, PAIR, plan=own, **options).plan.precision is None


class Outputs(nn.Module):
    """A module that returns the outputs of a recurrent layer, without its last state."""

    def forward(self, results: tuple[Tensor, Any]) -> Tensor:
        return results[0]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_equal_one_device(kind: type[nn.Module]) -> None:
    """LSTM and GRU in bfloat16 equal one device with the same casts."""
    torch.manual_seed(0)
    model = nn.Sequential(kind(8, 12, batch_first=True), Outputs(), nn.Linear(12, 4))
    check_plan(model, PAIR, (torch.randn(4, 5, 8),), precision="bf16").raise_if_different()


def test_a_model_that_is_narrow_already_is_left_as_it_is() -> None:
    """For a bfloat16 model, precisions "bf16" and None give the same program."""
    model, (x, _) = nn.Linear(8, 12, dtype=BF16), batch(0)
    made = [autoshard.plan(model, PAIR, precision=name, example_inputs=(x.to(BF16),)) for name in ("bf16", None)]
    assert made[0].program_digest == made[1].program_digest
    assert made[0].precision is None


def test_nothing_to_cast_is_said() -> None:
    with pytest.raises(NotAvailableError, match=r"precision='bf16' casts floating parameters, and ReLU has none"):
        autoshard.compile(nn.ReLU(), PAIR, precision="bf16")


def block(width: int = 2048, ffn: int = 8192, rows: int = 4096) -> tuple[nn.Module, tuple[Tensor]]:
    """Return a Llama-like feed-forward block on meta, and a batch of 8 sequences of `rows` tokens."""

    class FeedForward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.down = (
                nn.Linear(*sizes, bias=False) for sizes in ((width, ffn), (width, ffn), (ffn, width))
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.silu(self.gate(x)) * self.up(x)).square().mean()

    with torch.device("meta"):
        return FeedForward(), (torch.empty(8, rows, width),)


def test_memory_and_time_of_a_block() -> None:
    """A plan in bf16 has 4 bytes a weight and 8 of moments, and the time of products by bfloat16's peak."""
    model, inputs = block()
    cluster = Cluster("h100_sxm", nodes=1, devices_per_node=8)
    options = {"example_inputs": inputs, "optimizer": "adamw", "constraints": ZERO_3}
    narrow, wide = (
        autoshard.plan(model, cluster.mesh({"data": 8}), precision=name, **options) for name in ("bf16", None)
    )
    count = sum(parameter.numel() for parameter in model.parameters())
    assert narrow.predicted.memory_breakdown["parameters"] == 4 * count / 8
    assert narrow.predicted.memory_breakdown["optimizer state"] == 8 * count / 8
    flops = 6 * count * 8 * 4096 / 8
    products = sum(item.time_s for item in narrow.operators if item.operator == "aten.mm.default")
    assert 1 < products / (flops / cluster.device.peak("bf16")) < 2
    assert (
        1
        < sum(item.time_s for item in wide.operators if item.operator == "aten.mm.default")
        / (flops / cluster.device.peak("f32"))
        < 2
    )
    sent = narrow.predicted.breakdown["communication over data"] / wide.predicted.breakdown["communication over data"]
    assert 0.5 < sent < 0.9  # weights are gathered at half the bytes, gradients reduced at the same


# On processes.


def check_on_gloo(constraints: dict[str, P], parts: int) -> None:
    """Check that bfloat16 steps equal one device, with float32 master weights and state as DTensors."""
    step = check_step(ADAMW, LINE, parts, precision="bf16", constraints=constraints)
    assert all(isinstance(item, DTensor) for item in step.sharded.parameters())


CHECKS = {
    "ZeRO-1, 2 parts": partial(check_on_gloo, ZERO_1, 2),
    "ZeRO-3": partial(check_on_gloo, ZERO_3, 1),
}

test_on_four_processes = on_processes(CHECKS, slow=["ZeRO-3"])
