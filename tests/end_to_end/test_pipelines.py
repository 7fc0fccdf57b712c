"""Training in pipeline stages equals one device in losses, clipped gradients, and parameters after AdamW."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

import autoshard
from autoshard import Mesh, NotAvailableError, P, Recipe
from autoshard.errors import InvalidSpecError
from autoshard.runtime.stages.stage_meshes import is_elsewhere
from autoshard.testing import Link, delayed_mesh
from tests.end_to_end.training import Training, assert_equal, plain_step, whole
from tests.models import gpt2, llama, t5, vit
from tests.runtime.processes import on_processes
from tests.zoo.table import ARCHITECTURES

STEPS, MICRO_BATCHES, NORM = 5, 4, 0.3


class Skips(nn.Module):
    """A stack whose layers all read the first output, with a mask of the inputs and a tied last weight."""

    def __init__(self, layers: int = 4, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.embed = nn.Embedding(16, width)
        self.layers = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(width), requires_grad=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        first = hidden = self.embed(tokens)
        mask = (tokens > 2).unsqueeze(-1).to(hidden.dtype)
        for layer in self.layers:
            hidden = torch.tanh(layer(torch.cat([hidden * mask, first * self.frozen], dim=-1))) + hidden
            hidden = F.dropout(hidden, self.dropout) if self.dropout else hidden
        return F.cross_entropy((hidden @ self.embed.weight.t()).flatten(0, 1), targets.flatten())


def skips(dropout: float = 0.0) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    model = Skips(dropout=dropout)
    tokens = torch.randint(0, 16, (8, 4), generator=torch.Generator().manual_seed(1))
    return model, {"tokens": tokens, "targets": tokens.roll(1, 1)}


def mixture(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """Return a mixture of experts of the zoo, and a batch that micro-batches can split."""
    model, _ = ARCHITECTURES[name].build()
    tokens = torch.randint(0, 64, (8, 8), generator=torch.Generator().manual_seed(1))
    return model, {"input_ids": tokens, "labels": tokens}


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "gpt2": partial(gpt2, 2),
    "llama": partial(llama, 2),
    "t5": t5,
    "vit": partial(vit, 2),
    "mixtral": partial(mixture, "mixtral"),
    "deepseek_v3": partial(mixture, "deepseek_v3"),
    "skips": skips,
}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[], Tensor]) -> Training:
    """Train, and return the losses, first clipped gradients and parameters on this rank.

    AdamW's first moments are a tenth of the first clipped gradients.
    """
    losses, gradients = [], {}
    for number in range(STEPS):
        losses.append(whole(step()))
        if number == 0:
            states = {name: optimizer.state.get(item, {}) for name, item in model.named_parameters()}
            moments = {name: state["exp_avg"] for name, state in states.items() if state}
            gradients = {name: whole(item) * 10 for name, item in moments.items() if not is_elsewhere(item)}
    held = {name: whole(item) for name, item in model.named_parameters() if not is_elsewhere(item)}
    return Training(losses, gradients, held)


@cache
def on_one_device(name: str) -> Training:
    model, inputs = MODELS[name]()
    optimizer = adamw(model)
    return trained(model, optimizer, partial(plain_step, model, optimizer, limit=NORM, **inputs))


def compiled(name: str, mesh: Mesh | DeviceMesh, **options: Any) -> tuple[Any, nn.Module, dict[str, Any]]:
    model, inputs = MODELS[name]()
    settings = {"micro_batches": MICRO_BATCHES, "max_grad_norm": NORM, "time_budget_s": 5.0, **options}
    return autoshard.compile(model, mesh, optimizer=adamw(model), **settings), model, inputs


def check_equal(name: str, mesh: Mesh | DeviceMesh, **options: Any) -> Any:
    """Check that losses, first gradients and final parameters equal one device; a process has those of its stages."""
    step, model, inputs = compiled(name, mesh, **options)
    found, expected = trained(model, step.optimizer, partial(step, **inputs)), on_one_device(name)
    assert found.parameters, "a rank holds the parameters of its stage"
    assert torch.distributed.is_initialized() or found.parameters.keys() == expected.parameters.keys()
    mine = Training(
        expected.losses,
        {key: expected.gradients[key] for key in found.gradients},
        {key: expected.parameters[key] for key in found.parameters},
    )
    assert_equal(found, mine)
    return step


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "axes", "options"),
    [
        ("skips", {"pipeline": 4, "data": 2}, {"recipe": Recipe(schedule="GPipe")}),
        ("skips", {"data": 2, "pipeline": 2}, {"recipe": Recipe(schedule="LoopedBFS", virtual_stages=2)}),
        ("skips", {"pipeline": 2, "data": 2}, {"recipe": Recipe(schedule="InterleavedZeroBubble", virtual_stages=2)}),
        ("skips", {"pipeline": 2}, {"recipe": Recipe(schedule="ZBVZeroBubble")}),
        ("skips", {"pipeline": 2, "data": 2}, {"recipe": Recipe(schedule="DualPipeV")}),
        ("skips", {"pipeline": 3}, {}),
    ],
)
def test_simulated_stages_train_as_one_device(name: str, axes: dict[str, int], options: dict[str, Any]) -> None:
    """Two to four simulated stages train as one device, under each of several schedules."""
    check_equal(name, Mesh(axes), **options)


@pytest.mark.parametrize(
    ("constraints", "schedule"),
    [
        ({"*:*weight": P("data")}, "1F1B"),
        ({"layers.*.weight": P("data"), "*:*weight": P("data")}, "InterleavedZeroBubble"),
    ],
    ids=["ZeRO-1", "ZeRO-3"],
)
def test_simulated_stages_of_sharded_weights(constraints: dict[str, P], schedule: str) -> None:
    """With weights or optimizer state split inside stages, training equals one device, and specs are as constrained."""
    step = check_equal(
        "skips", Mesh({"pipeline": 2, "data": 2}), constraints=constraints, recipe=Recipe(schedule=schedule)
    )
    assert step.sharded.specs["layers.0.weight"] == constraints.get("layers.*.weight", P())


def test_each_parameter_belongs_to_one_stage() -> None:
    """Layers are assigned to stages in order, and the first and last stage exchange the tied embedding directly."""
    step, model, inputs = compiled("skips", Mesh({"pipeline": 4}))
    step.compile_for(**inputs)
    staged = step.sharded.program.staged
    stages = staged.stage_of_parameters()
    assert [stages[f"layers.{layer}.weight"] for layer in range(4)] == [0, 1, 2, 3]
    assert set(stages) == {name for name, _ in model.named_parameters()} - {"unused"}
    ways = {(item.maker, item.reader) for item in staged.crossings}
    assert {(0, 1), (1, 2), (2, 3), (0, 3), (1, 0), (2, 1), (3, 2), (3, 0)} <= ways


def test_dropout_is_that_of_one_device() -> None:
    """Losses with dropout in two stages equal those on a mesh without stages."""
    losses = []
    for axes in ({"data": 2}, {"pipeline": 2}):
        model, inputs = skips(dropout=0.1)
        torch.manual_seed(5)
        step = autoshard.compile(model, Mesh(axes), optimizer=adamw(model), micro_batches=2, time_budget_s=5.0)
        losses.append([float(step(**inputs)) for _ in range(2)])
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)


def test_state_dict_goes_on_without_stages() -> None:
    """A run without stages that loads the state dict of a run in stages continues as on one device."""
    step, _, inputs = compiled("skips", Mesh({"pipeline": 2}))
    for _ in range(2):
        step(**inputs)
    other, _, _ = compiled("skips", Mesh({"data": 2}))
    other.load_state_dict(copy.deepcopy(step.state_dict()))
    found = [other(**inputs) for _ in range(STEPS - 2)]
    torch.testing.assert_close(found, on_one_device("skips").losses[2:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("schedule", ["1F1B", "InterleavedZeroBubble"])
def test_a_stage_without_gradients(schedule: str) -> None:
    """A step with a frozen first stage, which has no backward, equals one device."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2)))
    model[0].requires_grad_(False)
    x, target = torch.randn(4, 4), torch.randn(4, 4)
    alone = copy.deepcopy(model)
    F.mse_loss(alone(x), target).backward()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"optimizer": optimizer, "loss_fn": F.mse_loss, "micro_batches": 2, "recipe": Recipe(schedule=schedule)}
    autoshard.compile(model, Mesh({"pipeline": 2}), **options)(x, target)
    torch.testing.assert_close(dict(model.named_parameters()), dict(alone.named_parameters()), rtol=1e-5, atol=1e-6)


class Views(nn.Module):
    """A model with so few calls that some stages have only views, which take no time."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = x * self.scale + self.shift
        return F.relu(hidden.permute(2, 0, 1)).permute(1, 2, 0).mean()


def test_stages_that_take_no_time() -> None:
    """A pipeline with a stage that has only views computes the loss of one device."""
    torch.manual_seed(0)
    model, x = Views(), torch.randn(16, 8, 8)
    expected = model(x).item()
    options = {
        "micro_batches": 4,
        "recipe": Recipe(schedule="InterleavedZeroBubble", virtual_stages=2),
        "time_budget_s": 2.0,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    step = autoshard.compile(model, Mesh({"pipeline": 3, "data": 2, "model": 2}), optimizer=optimizer, **options)
    assert float(step(x)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"optimizer": None, "micro_batches": None, "max_grad_norm": None}, NotAvailableError, "without optimizer="),
        (
            {"recipe": Recipe(schedule="DualPipeV"), "micro_batches": 1},
            NotAvailableError,
            "not run with micro_batches=1",
        ),
        ({"backend": "triton"}, NotAvailableError, "backend='triton' does not run stages"),
        ({"constraints": {"nowhere.*": P()}}, InvalidSpecError, "matches no parameter"),
    ],
)
def test_refused_by_name(options: dict[str, Any], error: type[Exception], words: str) -> None:
    """An argument that stages do not support raises an error that names it."""
    model, inputs = skips()
    asked = {"optimizer": adamw(model), "micro_batches": 4, "max_grad_norm": NORM, **options}
    with pytest.raises(error, match=words):
        autoshard.compile(model, Mesh({"pipeline": 2}), example_inputs=inputs, **asked)


class Halves(nn.Module):
    """A layer whose two output halves are multiplied; its forward can be cut at three places."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        left, right = torch.split(self.layer(x), 4, -1)
        return (left * right).mean()


def test_too_few_places_for_cuts_are_refused() -> None:
    """A forward with fewer places for cuts than five stages need raises an error with both numbers."""
    step = autoshard.compile(model := Halves(), Mesh({"pipeline": 5}), optimizer=adamw(model), micro_batches=5)
    with pytest.raises(NotAvailableError, match=r"needs 4 places for cuts, and the forward has 3: .*tuple"):
        step(torch.randn(10, 8))


def test_an_untraced_optimizer_is_refused() -> None:
    """An optimizer that is not traced is refused in stages."""
    model, _ = skips()
    with pytest.raises(NotAvailableError, match="RMSprop is not traced"):
        autoshard.compile(model, Mesh({"pipeline": 2}), optimizer=torch.optim.RMSprop(model.parameters()))


def test_hooks_on_gradients_are_refused() -> None:
    """A hook on a parameter's gradient raises in stages, because stages fill no `.grad`."""
    step, model, inputs = compiled("skips", Mesh({"pipeline": 2}))
    next(model.parameters()).register_hook(lambda gradient: None)
    with pytest.raises(NotAvailableError, match="has hooks on its gradient"):
        step(**inputs)


def _trains_behind_slow_links() -> None:
    links = {"pipeline": Link(latency_s=1e-3, bandwidth_bytes_per_s=1e6)}
    check_equal("skips", delayed_mesh({"pipeline": 2}, links))


def _holds_its_stage() -> None:
    step, model, inputs = compiled("skips", Mesh({"pipeline": 2}))
    step(**inputs)
    names = {name for name, value in model.named_parameters() if not is_elsewhere(value)}
    stages = step.sharded.program.staged.stage_of_parameters()
    mine = torch.distributed.get_rank()
    assert names - {"unused"} == {name for name, stage in stages.items() if stage == mine}
    assert ("unused" in names) == (mine == 0)
    with pytest.raises(NotAvailableError, match="wants gradients"):
        step.sharded(**inputs)


CHECKS = {
    "1F1B": partial(check_equal, "skips", Mesh({"pipeline": 2})),
    "zero bubble": partial(check_equal, "gpt2", Mesh({"pipeline": 2}), recipe=Recipe(schedule="InterleavedZeroBubble")),
    "a DeviceMesh of a pipeline alone": _trains_behind_slow_links,
    "holds": _holds_its_stage,
}
test_two_processes = on_processes(CHECKS, ranks=2)
