"""Every optimizer of torch, under every layout, equals one device or is refused by an error that names it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autoshard
from autoshard import Checkpoints, JoinedOptimizer, Mesh, NotAvailableError, P, Recipe
from autoshard.ir.program import Program
from autoshard.runtime.traced_optimizer import describe_update, names_of
from autoshard.runtime.train_step import TrainStep
from autoshard.testing.plans import plans
from autoshard.tracing import trace
from tests.end_to_end.training import plain_step, whole
from tests.own_optimizers import Lion, Shampoo
from tests.runtime.processes import on_processes
from tests.samples import examples

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
DATA, SQUARE = Mesh({"data": 2}), Mesh({"data": 2, "model": 2})
STEPS, TOLERANCE = 3, 1e-10


class Block(nn.Module):
    """Two matrices of one shape, a matrix of another shape, a bias and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.gate, self.up = nn.Linear(4, 6, bias=False), nn.Linear(4, 6)
        self.down = nn.Linear(6, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        return x + self.down(torch.tanh(self.gate(hidden)) * self.up(hidden))


class Net(nn.Module):
    """Two blocks and an output layer; returns the mean square."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


class Pair(nn.Module):
    """Two matrices of one shape and a bias; returns the mean square."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(4, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(self.first(x)) * self.second(x)).square().mean()


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


def pair() -> nn.Module:
    torch.manual_seed(0)
    return Pair().double()


def batch(number: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def with_muon(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Return Muon for the matrices of blocks, joined to AdamW for all other parameters."""
    named = dict(model.named_parameters())
    hidden = [item for name, item in named.items() if item.dim() == 2 and "head" not in name]
    others = [item for name, item in named.items() if item.dim() != 2 or "head" in name]
    return JoinedOptimizer(torch.optim.Muon(hidden, lr=0.05, **options), torch.optim.AdamW(others, lr=0.01, eps=1e-4))


def _of_torch(name: str, **options: Any) -> MakeOptimizer:
    return lambda model: getattr(torch.optim, name)(model.parameters(), lr=0.01, **options)


TRACED: dict[str, MakeOptimizer] = {
    "Muon": with_muon,
    "Muon, adjusted": partial(with_muon, nesterov=False, adjust_lr_fn="match_rms_adamw", weight_decay=0.3),
    "SGD": _of_torch("SGD", momentum=0.9),
    "AdamW": _of_torch("AdamW", eps=1e-4),
}
ELEMENTWISE: dict[str, MakeOptimizer] = {
    **{name: _of_torch(name) for name in ("Adadelta", "Adagrad", "ASGD")},
    **{name: _of_torch(name, eps=1e-4) for name in ("Adamax", "NAdam", "RAdam", "RMSprop")},
    "Lion": lambda model: Lion(model.parameters(), lr=0.01),
}
WHOLE: dict[str, MakeOptimizer] = {
    "Adafactor": _of_torch("Adafactor"),
    "Rprop": _of_torch("Rprop"),
    "Shampoo": lambda model: Shampoo(model.parameters(), lr=0.01),
}
OPTIMIZERS = {**TRACED, **ELEMENTWISE, **WHOLE}

LAYOUTS: dict[str, tuple[Mesh, dict[str, Any]]] = {
    "data": (DATA, {}),
    "model": (Mesh({"model": 2}), {}),
    "ZeRO-1": (DATA, {"recipe": Recipe(zero=1)}),
    "ZeRO-3": (DATA, {"recipe": Recipe(zero=3)}),
    "split": (SQUARE, {"constraints": {"*.up.weight": P("model", "data")}}),
    "pipeline": (Mesh({"pipeline": 2}), {"micro_batches": 2}),
}
SPLIT = ("ZeRO-3", "split")


def check_steps(
    make: MakeOptimizer,
    mesh: Mesh,
    *,
    limit: float | None = None,
    build: Callable[[], nn.Module] = net,
    **options: Any,
) -> TrainStep:
    """Check that losses, parameters and optimizer state after three steps equal one device; return the step."""
    model, plain = build(), build()
    optimizer, reference = make(model), make(plain)
    step = autoshard.compile(model, mesh, optimizer=optimizer, max_grad_norm=limit, **options)
    assert isinstance(step, TrainStep)
    for number in range(STEPS):
        expected = plain_step(plain, reference, batch(number), limit=limit)
        torch.testing.assert_close(torch.as_tensor(step(batch(number))), expected, rtol=TOLERANCE, atol=TOLERANCE)
    check_same(step, plain, reference)
    return step


def check_same(step: TrainStep, plain: nn.Module, reference: torch.optim.Optimizer) -> None:
    """Check that parameters and optimizer state equal one device."""
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(whole(step.sharded.state_dict()[name]), value, rtol=TOLERANCE, atol=TOLERANCE)
    mine, theirs = step.optimizer.state_dict()["state"], reference.state_dict()["state"]
    assert mine.keys() == theirs.keys()
    for number, state in theirs.items():
        assert mine[number].keys() == state.keys()
        for name, value in state.items():
            found = mine[number][name]
            found = whole(found) if isinstance(found, Tensor) else found
            torch.testing.assert_close(found, value, rtol=TOLERANCE, atol=TOLERANCE, msg=f"{number} {name}")


@pytest.mark.sample(5)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_under_every_layout(name: str, layout: str) -> None:
    """Traced optimizers run under every layout, elementwise ones not in stages, all others on whole parameters only."""
    mesh, options = LAYOUTS[layout]
    if name in WHOLE and layout in SPLIT:
        with pytest.raises(NotAvailableError, match=f"optimizer={name} needs each parameter whole"):
            autoshard.compile(model := net(), mesh, optimizer=OPTIMIZERS[name](model), **options)
    elif name not in TRACED and layout == "pipeline":
        with pytest.raises(NotAvailableError, match=f"optimizer={name} is not traced; use SGD, Adam, AdamW or Muon"):
            autoshard.compile(model := net(), mesh, optimizer=OPTIMIZERS[name](model), **options)
    else:
        step = check_steps(OPTIMIZERS[name], mesh, **options)
        assert step.is_traced == (name in TRACED)


@pytest.mark.parametrize(("name", "reason"), [("LBFGS", "needs a closure"), ("SparseAdam", "sparse gradients only")])
def test_optimizers_of_another_kind_are_refused(name: str, reason: str) -> None:
    """LBFGS, which calls the model, and SparseAdam, for sparse gradients, are refused, also in a joined optimizer."""
    model = net()
    optimizer = getattr(torch.optim, name)(model.parameters())
    for given_ in (optimizer, JoinedOptimizer(optimizer)):
        with pytest.raises(NotAvailableError, match=f"optimizer={name}.*{reason}"):
            autoshard.compile(model, DATA, optimizer=given_)


@cache
def program_of(name: str, build: Callable[[], nn.Module], limit: float | None = None) -> Program:
    """Return the traced program of a training step with an optimizer of `OPTIMIZERS`."""
    model = build()
    update = describe_update(OPTIMIZERS[name](model), names_of(model.named_parameters()), limit)
    return trace(model, (batch(0),), update=update)


@given(st.data())
@examples(3, 6)
def test_any_plan_of_muon_is_right(data: st.DataObject) -> None:
    """Steps of Muon equal one device under any plan."""
    name = data.draw(st.sampled_from(["Muon", "Muon, adjusted"]))
    mesh = data.draw(st.sampled_from([DATA, Mesh({"data": 3}), SQUARE]))
    limit = data.draw(st.sampled_from([None, 0.3]))
    plan = data.draw(plans(program_of(name, pair, limit), mesh))
    check_steps(OPTIMIZERS[name], mesh, plan=plan, limit=limit, build=pair)


def test_matrices_of_a_block_are_a_batch() -> None:
    """Muon's program orthogonalises matrices of one shape within a block as one batch."""
    program = program_of("Muon", net)
    calls = [node for node in program.graph.nodes if node.target is torch.ops.autoshard.orthogonalise.default]
    assert [tuple(node.meta["val"].shape) for node in calls] == [(2, 6, 4), (4, 6)] * 2
    assert [node.meta["module"] for node in calls] == ["layers.0", "layers.0.down", "layers.1", "layers.1.down"]


class Wide(nn.Module):
    """A model of one block of four large matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleList([nn.Linear(2048, 2048, bias=False) for _ in range(4)])])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[0]:
            x = torch.tanh(layer(x))
        return x.square().mean()


def test_ranks_share_large_matrices() -> None:
    """Muon's batch of four large matrices is split over four ranks, and a step is predicted slower than with SGD."""
    with torch.device("meta"):
        model = Wide()
        x = torch.empty(1024, 2048)
    mesh = autoshard.Cluster("h100_sxm", nodes=1, devices_per_node=4).mesh({"data": 4})
    muon, sgd = (
        autoshard.plan(model, mesh, example_inputs=(x,), optimizer=kind(model.parameters(), lr=0.1))
        for kind in (torch.optim.Muon, torch.optim.SGD)
    )
    (name,) = [name for name in muon.nodes if name.startswith("orthogonalise")]
    assert muon.nodes[name].inputs[0] == P("data")
    assert muon.predicted.step_time_s > sgd.predicted.step_time_s


# On processes.


def check_on_gloo(name: str, layout: str) -> None:
    """Check that steps on ranks equal one device; optimizer state of a parameter's shape must be a DTensor."""
    mesh, options = LAYOUTS[layout]
    step = check_steps(OPTIMIZERS[name], mesh, **options) if layout != "pipeline" else _check_stages(name)
    for parameter, state in step.optimizer.state.items():
        same = [item for item in state.values() if isinstance(item, Tensor) and item.shape == parameter.shape]
        assert all(isinstance(item, DTensor) for item in same if item.dim())


def _check_stages(name: str) -> TrainStep:
    """Check that the losses of three steps in two stages equal one device; return the step."""
    mesh, options = LAYOUTS["pipeline"]
    model, plain = net(), net()
    reference = OPTIMIZERS[name](plain)
    step = autoshard.compile(model, mesh, optimizer=OPTIMIZERS[name](model), **options)
    for number in range(STEPS):
        expected = plain_step(plain, reference, batch(number))
        torch.testing.assert_close(torch.as_tensor(step(batch(number))), expected, rtol=TOLERANCE, atol=TOLERANCE)
    return step


def check_checkpoint(name: str, folder: str) -> None:
    """Check that a fresh model that loads saved steps has the next losses of the saved model, bit by bit."""
    step = check_steps(OPTIMIZERS[name], DATA)
    checkpoints = Checkpoints(folder)
    checkpoints.save(step, at=STEPS)
    checkpoints.wait()
    model = net()
    again = autoshard.compile(model, DATA, optimizer=OPTIMIZERS[name](model), example_inputs=(batch(0),))
    assert Checkpoints(folder).load(again) == STEPS
    torch.testing.assert_close(torch.as_tensor(again(batch(9))), torch.as_tensor(step(batch(9))), rtol=0, atol=0)
    torch.testing.assert_close(torch.as_tensor(again(batch(8))), torch.as_tensor(step(batch(8))), rtol=0, atol=0)


ON_PROCESSES: dict[str, Callable[[], None]] = {
    **{
        f"{name}, {layout}": partial(check_on_gloo, name, layout)
        for name, layout in (
            *(("Muon", "ZeRO-1"), ("Muon", "pipeline"), ("Lion", "ZeRO-3")),
            *(("Adafactor", "data"), ("Rprop", "ZeRO-1"), ("Shampoo", "data")),
        )
    },
}

test_on_two_ranks = on_processes(ON_PROCESSES, ranks=2, slow=["Muon, pipeline", "Lion, ZeRO-3", "Shampoo, data"])


@pytest.mark.parametrize("name", ["Muon", "Shampoo"])
def test_checkpoints_go_on(name: str, tmp_path: Any) -> None:
    """A joined optimizer, and optimizer state of other shapes than the parameter's, continue from a checkpoint."""
    check_checkpoint(name, str(tmp_path))
