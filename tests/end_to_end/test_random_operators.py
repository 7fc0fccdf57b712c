"""Random numbers that a model draws in `forward` do not depend on the plan."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import autoshard
from autoshard import Mesh, P, PartitionSpec
from autoshard.ir.recompute import Recompute, RecomputedNode
from autoshard.rules.fan_out import fan_out
from autoshard.tracing import trace
from passes.lowering.lower_program import prepare
from passes.recomputation.recompute import InsertRecompute
from tests.end_to_end.random_models import FAMILIES, Drawing
from tests.end_to_end.training import plain_step, whole
from tests.passes.greedy_plans import most_split_plan
from tests.runtime.processes import on_processes

ONE, PAIR, SQUARE, THREE = Mesh({"a": 1}), Mesh({"data": 2}), Mesh({"data": 2, "model": 2}), Mesh({"a": 3})


def _drawn(family: str, mesh: Mesh, spec: PartitionSpec, shape: tuple[int, int]) -> tuple[list[Tensor], Tensor]:
    """Return all outputs and the parameter's gradient for one seed, with the input split by `spec`."""
    draws = FAMILIES[family]
    constraints = {"input:0": spec}
    sharded = autoshard.compile(Drawing(draws, shape[1]), mesh, constraints=constraints)
    torch.manual_seed(5)
    outputs = sharded(torch.linspace(-2.0, 2.0, shape[0] * shape[1]).reshape(shape))
    sum(output.double().square().mean() for output in outputs).backward()
    return list(outputs), sharded.scale.grad


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("mesh", "spec", "shape"),
    [
        pytest.param(PAIR, P("data"), (8, 6), id="rows"),
        pytest.param(SQUARE, P("data", "model"), (4, 6), id="rows and columns", marks=pytest.mark.slow),
        pytest.param(THREE, P(None, "a"), (4, 5), id="unevenly"),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_operator_draws_what_one_rank_draws(
    family: str, mesh: Mesh, spec: PartitionSpec, shape: tuple[int, int]
) -> None:
    """Every random operator draws the bits of one rank, and gradients equal those of one rank."""
    found, found_gradient = _drawn(family, mesh, spec, shape)
    expected, expected_gradient = _drawn(family, ONE, P(), shape)
    for name, value, reference in zip(FAMILIES[family], found, expected, strict=True):
        assert torch.equal(value, reference), (name, value, reference)
    torch.testing.assert_close(found_gradient, expected_gradient)


class Diffusion(nn.Module):
    """A diffusion model's training loss, with a random time and random noise for each sample."""

    def __init__(self, width: int = 16, times: int = 10) -> None:
        super().__init__()
        self.register_buffer("kept", torch.linspace(0.9, 0.1, times))
        self.time = nn.Embedding(times, width)
        self.net = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, latents: Tensor) -> Tensor:
        noise = torch.randn_like(latents)
        time = torch.randint(0, len(self.kept), (latents.shape[0],), device=latents.device)
        kept = self.kept[time, None]
        found = self.net(kept.sqrt() * latents + (1.0 - kept).sqrt() * noise + self.time(time))
        return F.mse_loss(found, noise)


def _diffusion() -> Diffusion:
    torch.manual_seed(1)
    return Diffusion()


def _latents(rows: int = 8) -> Tensor:
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(2))


def _three_steps(model: nn.Module, latents: Tensor) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return [plain_step(model, optimizer, latents).item() for _ in range(3)]


@pytest.mark.parametrize("mesh", [PAIR, SQUARE, THREE], ids=str)
def test_a_diffusion_model_trains_as_on_one_rank(mesh: Mesh) -> None:
    """A diffusion model trains for three steps as on one rank, each step with fresh noise and times."""
    trainings = []
    for chosen in (mesh, ONE):
        spec = P(chosen.axis_names[0])
        sharded = autoshard.compile(_diffusion(), chosen, constraints={"input:*": spec})
        torch.manual_seed(7)
        losses = _three_steps(sharded, _latents())
        trainings.append([*losses, *(parameter.detach() for parameter in sharded.parameters())])
        assert len(set(losses)) == 3
    torch.testing.assert_close(*trainings)


def test_the_loss_is_distributed_as_on_one_device() -> None:
    """The mean loss over 60 calls equals the mean of plain PyTorch within five standard errors."""
    plain, latents = _diffusion(), _latents(64)
    sharded = autoshard.compile(_diffusion(), PAIR)
    torch.manual_seed(3)
    with torch.no_grad():
        mine, theirs = (torch.stack([model(latents) for _ in range(60)]) for model in (sharded, plain))
    error = (mine.var() / 60 + theirs.var() / 60).sqrt()
    assert abs(mine.mean() - theirs.mean()) < 5 * error


class _Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


def test_a_seed_starts_the_sequence_and_calls_go_on_in_it() -> None:
    """Consecutive calls draw different numbers, and `torch.manual_seed` with the same seed repeats the sequence."""
    sharded, x = autoshard.compile(_Noise(), PAIR), torch.zeros(4, 4)
    torch.manual_seed(3)
    first, second = sharded(x), sharded(x)
    assert not torch.equal(first, second)
    torch.manual_seed(4)
    assert not torch.equal(sharded(x), first)
    torch.manual_seed(3)
    assert torch.equal(sharded(x), first)
    assert torch.equal(sharded(x), second)
    sharded.seeds.restart()
    assert torch.equal(sharded(x), first)


@pytest.mark.parametrize("context", [torch.no_grad, torch.enable_grad])
def test_evaluation_draws_too(context: Callable[[], AbstractContextManager[None]]) -> None:
    """In evaluation, with and without gradients, each call draws new numbers, which are equal on every mesh."""
    samples = []
    for mesh in (PAIR, ONE):
        sharded, x = (
            autoshard.compile(_Noise().eval(), mesh, constraints={"input:0": P(mesh.axis_names[0])}),
            torch.zeros(4, 4),
        )
        torch.manual_seed(3)
        with context():
            samples.append([sharded(x), sharded(x)])
    assert not torch.equal(*samples[0])
    for found, expected in zip(*samples, strict=True):
        assert torch.equal(found, expected)


def test_layers_are_dropped_by_what_is_drawn() -> None:
    """A branch on a random number is the same on every mesh, and is drawn anew in each call."""

    class LayerDrop(nn.Module):
        def __init__(self, p: float) -> None:
            super().__init__()
            self.layers, self.p = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), p

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                if torch.rand([]) >= self.p:
                    x = layer(x)
            return x.square().mean()

    for p, ways in ((0.0, 1), (0.5, 4)):
        losses = []
        for mesh in (PAIR, ONE):
            torch.manual_seed(0)
            sharded = autoshard.compile(LayerDrop(p), mesh)
            torch.manual_seed(4)
            losses.append([sharded(torch.ones(4, 4)).item() for _ in range(12)])
            assert len(sharded.programs) == len(set(losses[-1])) == ways
        assert losses[0] == pytest.approx(losses[1])


def test_two_operators_and_two_elements_draw_different_numbers() -> None:
    """Two calls of one layer draw different numbers, also within one tensor."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.noise = _Noise()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.noise(x), self.noise(x)

    first, second = autoshard.compile(Twice(), PAIR)(torch.zeros(8, 8))
    assert len(torch.cat([first, second]).unique()) == 128


def test_micro_batches_draw_fresh_numbers() -> None:
    """Two micro-batches of a step draw the numbers of two consecutive calls, on any mesh."""

    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return (self.scale * torch.rand_like(x)).mean()

    x = torch.zeros(8, 4)
    losses, scales = {}, {}
    for parts in (1, 2):
        for mesh in (PAIR, ONE):
            step = autoshard.compile(
                model := Draws(), mesh, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), micro_batches=parts,
                constraints={"input:0": P(mesh.axis_names[0])},
            )  # fmt: skip
            torch.manual_seed(3)
            losses[parts, mesh] = float(step(x))
            scales[parts, mesh] = step.sharded.scale.detach()
        torch.testing.assert_close(scales[parts, PAIR], scales[parts, ONE])
    torch.manual_seed(3)
    forward = autoshard.compile(Draws(), ONE)
    halves = [forward(x[:4]).item() for _ in range(2)]
    assert losses[2, PAIR] == pytest.approx(sum(halves) / 2, rel=1e-6)
    assert halves[0] != halves[1]
    assert losses[1, PAIR] != pytest.approx(losses[2, PAIR], rel=1e-3)


class _Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale * torch.rand_like(x)).sum()


def test_recomputed_numbers_are_the_first_ones() -> None:
    """Random numbers that are recomputed in the backward equal those of the forward."""
    x = torch.linspace(-1.0, 1.0, 48).reshape(8, 6)
    program = trace(_Masked(), (x,))
    prepared = prepare(program).nodes_by_name()
    drawn = [name for name in prepared if name.startswith("random")]
    held = [*drawn, *(user.name for name in drawn for user in prepared[name].users if user.target is fan_out)]
    reader = next(
        name for name, node in prepared.items() if node.meta.get("phase") == "backward" and _reads(node, held)
    )
    again = tuple(RecomputedNode(name, reader, "") for name in held)
    plan = most_split_plan(program, PAIR)
    nodes = {**plan.nodes, **{f"{name}_again": plan.nodes[name] for name in held if name in plan.nodes}}
    digest = InsertRecompute(again, ())(prepare(program)).digest()
    plan = replace(plan, nodes=nodes, recompute=Recompute(again), program_digest=digest)
    results = []
    for mesh, chosen in ((PAIR, plan), (ONE, None)):
        sharded = autoshard.compile(_Masked(), mesh, plan=chosen, example_inputs=(x,))
        torch.manual_seed(7)
        loss = sharded(x)
        loss.backward()
        results.append([loss.detach(), sharded.scale.grad])
        is_kept = any("random" in name for name in sharded.program.phased.saved)
        assert is_kept == (chosen is None)
    torch.testing.assert_close(*results)


def _reads(node: fx.Node, names: Collection[str]) -> bool:
    return any(operand.name in names for operand in node.all_input_nodes)


def check_on_gloo() -> None:
    """On two processes, random operators draw the bits of a mesh of one rank."""
    found, gradient = _drawn("of values", PAIR, P("data"), (4, 6))
    expected, expected_gradient = _drawn("of values", ONE, P(), (4, 6))
    for value, reference in zip(found, expected, strict=True):
        assert torch.equal(value, reference)
    torch.testing.assert_close(whole(gradient), expected_gradient)


test_processes_draw_what_one_rank_draws = on_processes({"draws": check_on_gloo}, ranks=2)
