"""The whole training step as one program: clipping, update and state follow the backward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from autoshard.ir.program import InputKind, OutputKind, Program
from autoshard.ir.update import Update, UpdateGroup, UpdateRule
from autoshard.kernels.optimizers import ADAM_HYPER, SGD_HYPER
from autoshard.tracing import trace

ADAM = UpdateRule("adam_update", ("exp_avg", "exp_avg_sq"), (True, False), ADAM_HYPER)
MOMENTUM = UpdateRule("momentum_update", ("momentum_buffer",), (False, False), SGD_HYPER)
HYPER = {
    "hyper:0": torch.tensor([0.05, 0.9, 0.99, 1e-8, 0.1, 0.0], dtype=torch.float64),
    "hyper:1": torch.tensor([0.1, 0.0, 0.9, 0.0, 1.0], dtype=torch.float64),
}


class Net(nn.Module):
    """Two layers that share a weight, a scale, and a parameter that the forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.second(self.first(x).tanh()) * self.scale, x)


def _net() -> Net:
    torch.manual_seed(0)
    return Net().double()


X = torch.linspace(-2, 2, 24, dtype=torch.float64).view(6, 4)


def _update(limit: float | None) -> Update:
    return Update(
        "Both", (UpdateGroup(ADAM, ("first.weight", "unused")), UpdateGroup(MOMENTUM, ("first.bias",))), limit
    )


def _run(program: Program, model: nn.Module, scale: float = 1.0) -> dict[str, Tensor]:
    """Results by kind and name, for a state of zeros and a loss multiplied by `scale`."""
    parameters = dict(model.named_parameters())
    given: dict[tuple[InputKind, str], Any] = {(InputKind.INPUT, "input:0"): X}
    given |= {(InputKind.PARAMETER, name): item.detach() for name, item in parameters.items()}
    given |= {(InputKind.HYPER, name): item for name, item in HYPER.items()}
    given[InputKind.TANGENT, "tangent:0"] = torch.full((), scale, dtype=torch.float64)
    given[InputKind.UNSCALE, "unscale:all"] = torch.tensor(1 / scale, dtype=torch.float32)
    nodes = program.nodes_by_name()
    values = [
        torch.zeros(nodes[slot.node].meta["val"].shape, dtype=torch.float64)
        if slot.kind == InputKind.STATE
        else given[slot.kind, slot.name]
        for slot in program.inputs
    ]
    found = fx.Interpreter(program.graph_module).run(*values)
    return {f"{slot.kind} {slot.name}": value for slot, value in zip(program.outputs, found, strict=True)}


@pytest.mark.parametrize("limit", [None, 0.05, 1e3], ids=["unclipped", "clipped", "under the limit"])
def test_a_traced_step_is_a_step(limit: float | None) -> None:
    """Parameters and state after one step of two optimizers equal those of torch's own steps."""
    model = _net()
    found = _run(trace(model, (X,), update=_update(limit)), model)
    model(X).backward()
    norm = None if limit is None else nn.utils.clip_grad_norm_(model.parameters(), limit)
    adam = torch.optim.AdamW([model.first.weight, model.unused], lr=0.05, betas=(0.9, 0.99), weight_decay=0.1)
    sgd = torch.optim.SGD([model.first.bias], lr=0.1, momentum=0.9)
    adam.step()
    sgd.step()
    state = adam.state[model.first.weight]
    expected = {
        "parameter_update first.weight": model.first.weight,
        "parameter_update first.bias": model.first.bias,
        "state_update exp_avg:first.weight": state["exp_avg"],
        "state_update exp_avg_sq:first.weight": state["exp_avg_sq"],
        "state_update momentum_buffer:first.bias": sgd.state[model.first.bias]["momentum_buffer"],
    }
    expected |= {} if norm is None else {"norm norm:all": norm}
    assert found.keys() - {"output output:0"} == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value.detach(), rtol=1e-12, atol=1e-12, msg=name)


def test_an_unclipped_step_returns_the_norm_if_asked() -> None:
    """With `returns_norm` the program returns the norm of all gradients, and the other results do not change."""
    model = _net()
    update = replace(_update(None), returns_norm=True)
    plain, found = (_run(trace(model, (X,), update=item), model) for item in (_update(None), update))
    model(X).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    torch.testing.assert_close(found.pop("norm norm:all"), norm, rtol=1e-12, atol=0.0)
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[name], value) for name, value in plain.items())


@pytest.mark.parametrize("limit", [None, 0.05])
def test_a_scaled_step_is_the_same_step(limit: float | None) -> None:
    """A factor on the loss changes neither the norm nor the update, because the program divides by it again."""
    model, update = _net(), replace(_update(limit), returns_norm=True)
    program = trace(model, (X,), update=replace(update, scales_loss=True))
    assert [slot.node for slot in program.inputs_of(InputKind.UNSCALE)] == ["unscale_all"]
    found, expected = _run(program, model, 2.0**20), _run(trace(model, (X,), update=update), model)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=name)


def test_slots_of_a_whole_step() -> None:
    """State and hyper-parameters are inputs of the program, the update follows the backward, and gradients are no
    outputs."""
    program = trace(_net(), (X,), update=_update(1.0))
    assert [slot.name for slot in program.inputs_of(InputKind.STATE)] == [
        "exp_avg:first.weight",
        "exp_avg_sq:first.weight",
        "momentum_buffer:first.bias",
    ]
    assert [slot.name for slot in program.inputs_of(InputKind.HYPER)] == ["hyper:0", "hyper:1"]
    assert not program.outputs_of(OutputKind.GRADIENT)
    placeholders = [node.name for node in program.graph.nodes if node.op == "placeholder"]
    assert placeholders == [slot.node for slot in program.inputs]
    phases = [node.meta["phase"] for node in program.graph.nodes if node.op == "call_function"]
    assert phases == sorted(phases, key=["forward", "backward", "update"].index)


def test_the_program_of_a_step_is_the_same_every_time() -> None:
    """Two traces of a step have the same digest, and a step without clipping has another."""
    one, two = (trace(_net(), (X,), update=_update(1.0)).digest() for _ in range(2))
    assert one == two != trace(_net(), (X,), update=_update(None)).digest()
