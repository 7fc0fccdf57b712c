"""Operators on images split along height and width, and on rows split along their width, equal one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autoshard
from autoshard import Mesh, P
from autoshard.ir.plan import Plan
from autoshard.ir.program import Program
from autoshard.rules.enumeration import Strategy
from autoshard.testing import check_plan
from autoshard.testing.decided_plans import greedy_plan
from autoshard.tracing import trace
from passes.strategies.enumerate_strategies import Site
from tests.end_to_end.training import assert_close, whole
from tests.runtime.processes import on_processes

MESHES = [Mesh({"a": 2}), Mesh({"a": 2, "b": 2})]
Score = Callable[[Site, Strategy], int]


class Network(nn.Module):
    """A residual network with every kind of window, such as strided, dilated and transposed convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 7, stride=2, padding=3, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.wide = nn.Conv2d(4, 4, 3, padding=2, dilation=2, groups=2)
        self.down = nn.Conv2d(4, 6, 1, stride=2, bias=False)
        self.up = nn.ConvTranspose2d(6, 4, 4, stride=2, padding=1)
        self.smooth = nn.AvgPool2d(3, stride=1, padding=1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(torch.relu(self.norm(self.stem(x))))
        x = x + torch.relu(self.wide(x))
        x = x + self.up(self.down(x))
        x = nn.functional.adaptive_avg_pool2d(self.smooth(x), 2) + nn.functional.max_pool2d(x, 4)
        return self.head(x.mean((2, 3))).square().sum()


def _network(*, training: bool) -> tuple[nn.Module, tuple[torch.Tensor]]:
    torch.manual_seed(0)
    return Network().train(training), (torch.randn(2, 2, 32, 32),)


def _spatial_axes(_: Site, strategy: Strategy) -> int:
    """Return how many axes split spatial dims, in all inputs and outputs of a strategy."""
    return sum(len(axes) for spec in (*strategy.inputs, *strategy.outputs) for axes in spec.dims[2:])


def _cut(program: Program, mesh: Mesh) -> Plan:
    """Return a plan with images split wherever possible, after a check that every windowed operator is split."""
    plan = greedy_plan(program, mesh, _spatial_axes)
    windows = [plan.nodes[node.name] for node in program.graph.nodes if _has_windows(str(node.target))]
    assert len(windows) > 15
    cut = [node for node in windows if any(spec.axes_of(2) or spec.axes_of(3) for spec in node.inputs)]
    assert len(cut) == len(windows)
    return plan


def _has_windows(operator: str) -> bool:
    return any(name in operator for name in ("convolution", "pool2d", "batch_norm"))


@pytest.mark.sample(1)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("training", [False, True])
def test_a_network_on_pieces_of_images_equals_one_device(mesh: Mesh, training: bool) -> None:
    """With images split in every windowed operator, two steps of a network equal one device."""
    model, inputs = _network(training=training)
    plan = _cut(trace(model, inputs), mesh)
    check_plan(model, mesh, inputs, plan=plan, steps=2, precise=torch.float64).raise_if_different()


class Rows(nn.Module):
    """A model of operators that need whole rows: norms, softmax, scans, extremes, statistics."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer, self.rms = nn.LayerNorm(width), nn.RMSNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.rms(self.layer(x)) * x.softmax(1) + x.cumsum(1)
        best, place = x.max(1)
        spread = x.var(1) + x.logsumexp(1) + best * place + x.argmin(1)
        return (x.log_softmax(1).square().mean(1) * spread).sum()


def _last_axes(_: Site, strategy: Strategy) -> int:
    """Return how many axes split dim 1, in all inputs and outputs of a strategy."""
    return sum(len(spec.axes_of(1)) for spec in (*strategy.inputs, *strategy.outputs))


def _rows(width: int = 12) -> tuple[nn.Module, tuple[torch.Tensor]]:
    torch.manual_seed(0)
    return Rows(width), (torch.randn(3, width),)


@pytest.mark.sample(2)
@pytest.mark.parametrize("mesh", [*MESHES, Mesh({"a": 4})], ids=str)
@pytest.mark.parametrize("width", [12, 7])
def test_pieces_of_rows_equal_one_device(mesh: Mesh, width: int) -> None:
    """Operators that need whole rows run on rows split evenly or not, and equal one device."""
    model, inputs = _rows(width)
    program = trace(model, inputs)
    plan = greedy_plan(program, mesh, _last_axes)
    names = ("native_layer_norm", "rms_norm", "softmax", "cumsum", "max_1", "var", "logsumexp", "argmin")
    for name in names:
        found = [node for key, node in plan.nodes.items() if name in key and "getitem" not in key]
        assert found, name
        assert any(spec.axes_of(1) for node in found for spec in node.inputs), name
    check_plan(model, mesh, inputs, plan=plan, precise=torch.float64).raise_if_different()


def _check_on_processes(build: Callable[[], tuple[nn.Module, tuple[torch.Tensor]]], score: Score) -> None:
    model, inputs = build()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    plan = greedy_plan(trace(model, inputs), Mesh({"a": 2, "b": 2}), score)
    plain = copy.deepcopy(model)
    found, expected = autoshard.compile(model, mesh, plan=plan)(*inputs), plain(*inputs)
    found.backward()
    expected.backward()
    assert_close(found.detach(), expected.detach(), "loss")
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert (whole(mine.grad) - theirs.grad).abs().max() <= 1e-5 * theirs.grad.abs().max() + 1e-6, name


CHECKS = {
    "images": partial(_check_on_processes, partial(_network, training=False), _spatial_axes),
    "rows": partial(_check_on_processes, _rows, _last_axes),
}


test_on_processes = on_processes(CHECKS, slow=CHECKS)


@pytest.mark.sample(2)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("spec", [P(None, None, "a"), P(None, None, None, "a")], ids=str)
def test_an_input_is_constrained_to_pieces(mesh: Mesh, spec: P) -> None:
    """With the input constrained to a split of height or width, the planner's plan equals one device."""
    model, inputs = _network(training=False)
    plan = autoshard.plan(model, mesh, example_inputs=inputs, constraints={"input:0": spec}, precision=None)
    check_plan(model, mesh, inputs, plan=plan, precise=torch.float64).raise_if_different()


def test_the_planner_cuts_a_large_image() -> None:
    """For a single large image, the planner splits all convolutions along height or width."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Conv2d(16, 16, 3, padding=1) for _ in range(4)))
    image = torch.empty(1, 16, 2048, 2048, device="meta")
    cluster = autoshard.Cluster("h100_sxm", 1, 2)
    plan = autoshard.plan(model, cluster.mesh({"a": 2}), example_inputs=(image,), precision=None)
    convolutions = [node for name, node in plan.nodes.items() if name.startswith("convolution")]
    assert len(convolutions) == 8
    assert all(node.inputs[0].axes_of(2) or node.inputs[0].axes_of(3) for node in convolutions)
