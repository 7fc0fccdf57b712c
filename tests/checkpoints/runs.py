"""Small training runs to save, stop and continue: a model whose state is hard to save, under several plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR

import autoshard
from autoshard import Mesh, P
from autoshard.runtime.train_step import TrainStep
from tests.end_to_end.training import whole

SQUARE, LINE, PAIR, ONE = Mesh({"data": 2, "model": 2}), Mesh({"data": 4}), Mesh({"data": 2}), Mesh({"data": 1})
ZERO_1 = {"first.*": P(), "second.*": P(), "*:*weight": P("data"), "input:*": P("data")}
ZERO_3 = {"*weight": P("data"), "*:*weight": P("data"), "input:*": P("data")}
WEIGHTS = {"*weight": P("data"), "input:*": P("data")}
TENSOR = {"first.weight": P("model"), "second.weight": P(None, "model"), "input:*": P("data")}

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "traced": lambda groups: torch.optim.AdamW(groups, lr=0.02),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.02, momentum=0.9),
    "own": lambda groups: torch.optim.Adamax(groups, lr=0.02),
}


class Net(nn.Module):
    """A model with dims that ranks do not divide, a tied weight, a scalar, dropout, and batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 7), nn.Linear(7, 6), nn.Linear(6, 7, bias=False)
        self.third.weight = self.first.weight
        self.norm, self.drop = nn.BatchNorm1d(7), nn.Dropout(0.3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(self.norm(F.gelu(self.first(x))))
        return self.scale * self.third(self.second(hidden))


def net(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net().double()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups of an optimizer, of which the biases have their own learning rate."""
    named = dict(model.named_parameters())
    biases = [item for name, item in named.items() if name.endswith("bias")]
    others = [item for name, item in named.items() if not name.endswith("bias")]
    return [{"params": others}, {"params": biases, "lr": 0.01}]


def batch(number: int) -> tuple[Tensor, Tensor]:
    drawn = torch.randn(8, 13, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
    return drawn[:, :6], drawn[:, 6:]


@dataclass
class Run:
    """A training run, whose optimizer `kind` selects."""

    kind: str
    mesh: Mesh
    constraints: dict[str, Any]
    seed: int = 0
    planned: bool = True
    step: TrainStep = field(init=False)
    schedule: StepLR = field(init=False)

    def __post_init__(self) -> None:
        model = net(self.seed)
        optimizer = OPTIMIZERS[self.kind](groups(model))
        given = {"example_inputs": batch(0)} if self.planned else {}
        made = autoshard.compile(
            model, self.mesh, optimizer=optimizer, loss_fn=F.mse_loss, constraints=self.constraints, **given
        )
        assert isinstance(made, TrainStep)
        self.step, self.schedule = made, StepLR(optimizer, 2, 0.7)

    def train(self, start: int, end: int) -> list[float]:
        """Train the steps from `start` to before `end`, and return their losses."""
        losses = []
        for number in range(start, end):
            losses.append(self.step(*batch(number)).item())
            self.schedule.step()
        return losses

    def values(self) -> dict[str, Tensor]:
        """All values of the run that a checkpoint saves."""
        model, optimizer = self.step.sharded, self.step.optimizer
        found = {f"model.{name}": whole(item) for name, item in model.state_dict().items() if name != "_extra_state"}
        names = {id(item): name for name, item in model.named_parameters()}
        for parameter, state in optimizer.state.items():
            found |= {f"{names[id(parameter)]}.{key}": whole(torch.as_tensor(item)) for key, item in state.items()}
        rates = [group["lr"] for group in optimizer.param_groups]
        found |= {"lr": torch.tensor(rates), "epoch": torch.tensor(self.schedule.last_epoch)}
        return found | {"seeds": model.seeds.state(), "random": torch.get_rng_state()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The values have the same names and are equal bit for bit."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    differing = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not differing


class Counter:
    """An object of the user with a state."""

    def __init__(self, value: Any = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "history": [torch.arange(3), {"deep": torch.ones(2)}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert torch.equal(state["history"][0], torch.arange(3))
        self.value = state["value"]
