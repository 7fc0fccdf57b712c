"""Images cut along height and width: convolutions, pooling and normalisation on pieces equal one device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autoshard
from autoshard import Mesh, P
from autoshard.ir.plan import Plan
from autoshard.ir.program import Program
from autoshard.rules.enumeration import Strategy
from autoshard.testing import check_plan
from autoshard.testing.plans import greedy_plan
from autoshard.tracing import trace
from passes.enumerate_strategies import Site

MESHES = [Mesh({"a": 2}), Mesh({"a": 2, "b": 2})]


class Network(nn.Module):
    """Residual block and head: every kind of window."""

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
    """How many axes split spatial dims."""
    return sum(len(axes) for spec in (*strategy.inputs, *strategy.outputs) for axes in spec.dims[2:])


def _cut(program: Program, mesh: Mesh) -> Plan:
    """A plan that cuts images wherever it can, and checks that it is so."""
    plan = greedy_plan(program, mesh, _spatial_axes)
    windows = [plan.nodes[node.name] for node in program.graph.nodes if _has_windows(str(node.target))]
    assert len(windows) > 15
    cut = [node for node in windows if any(spec.axes_of(2) or spec.axes_of(3) for spec in node.inputs)]
    assert len(cut) == len(windows)
    return plan


def _has_windows(operator: str) -> bool:
    return any(name in operator for name in ("convolution", "pool2d", "batch_norm"))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("training", [False, True])
def test_a_network_on_pieces_of_images_equals_one_device(mesh: Mesh, training: bool) -> None:
    """Outputs, all gradients and statistics; the lowered program is proved."""
    model, inputs = _network(training=training)
    plan = _cut(trace(model, inputs), mesh)
    check_plan(model, mesh, inputs, plan=plan, steps=2, precise=torch.float64).raise_if_different()


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("spec", [P(None, None, "a"), P(None, None, None, "a")], ids=str)
def test_an_input_is_constrained_to_pieces(mesh: Mesh, spec: P) -> None:
    """Whatever the planner does with it."""
    model, inputs = _network(training=False)
    plan = autoshard.plan(model, mesh, example_inputs=inputs, constraints={"input:0": spec})
    check_plan(model, mesh, inputs, plan=plan, precise=torch.float64).raise_if_different()


def test_the_planner_cuts_a_large_image() -> None:
    """One image is no batch to be split: its halos are sent, and the time of the convolutions halves."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Conv2d(16, 16, 3, padding=1) for _ in range(4)))
    image = torch.empty(1, 16, 2048, 2048, device="meta")
    cluster = autoshard.Cluster("h100_sxm", 1, 2)
    plan = autoshard.plan(model, cluster, mesh=Mesh({"a": 2}), example_inputs=(image,))
    convolutions = [node for name, node in plan.nodes.items() if name.startswith("convolution")]
    assert len(convolutions) == 8
    assert all(node.inputs[0].axes_of(2) or node.inputs[0].axes_of(3) for node in convolutions)
