"""Operators that read memory by strides get the strides of one device, under any split."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

import autoshard
from autoshard import Mesh, NotAvailableError, P
from autoshard.rules.enumeration import Strategy
from autoshard.testing import check_plan
from autoshard.testing.decided_plans import greedy_plan, laptop
from autoshard.tracing import trace
from passes.lowering.lower_program import lower_program
from passes.memory.lowered_memory import peak_bytes
from passes.strategies.enumerate_strategies import Site

MESH = Mesh({"model": 2})


class Windows(nn.Module):
    """Overlapping strided windows of a transposed value."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        windows = torch.as_strided(self.first(x).transpose(0, 1), (7, 4, 2), (2, 1, 3))
        return self.second(windows.transpose(1, 2)).pow(2).mean()


class Gaps(nn.Module):
    """A strided read of every second column."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_strided((x * 2)[:, ::2], (6, 2), (8, 4)).sum()


@pytest.mark.parametrize("constraints", [None, {"input:0": P("model")}, {"first.weight": P("model")}], ids=str)
def test_windows_of_permuted_memory_equal_one_device(constraints: dict[str, autoshard.PartitionSpec] | None) -> None:
    """`as_strided` of a transposed value equals one device, whether the value was gathered or computed whole."""
    torch.manual_seed(0)
    model, inputs = Windows(), (torch.randn(6, 8),)
    plan = autoshard.plan(model, MESH, example_inputs=inputs, constraints=constraints, precision=None)
    check_plan(model, MESH, inputs, plan=plan).raise_if_different()


def test_memory_with_gaps_is_refused_where_it_moves() -> None:
    """`as_strided` of memory with gaps raises if the input must be gathered first."""
    constraints = {"input:0": P("model")}
    with pytest.raises(NotAvailableError, match=r"as_strided.*reads memory by strides"):
        autoshard.compile(Gaps(), MESH, example_inputs=(torch.randn(6, 8),), constraints=constraints)


PERMUTED: dict[str, tuple[tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]]] = {
    "group_norm": ((1, 2, 3, 0), lambda x: functional.group_norm(x, 2)),
    "group_norm of channels-last frames": (
        (0, 3, 1, 2),
        lambda x: functional.group_norm(x.reshape(2, 2, 4, 4, 4).permute(0, 2, 1, 3, 4), 2),
    ),
    "pdist": ((1, 2, 3, 0), lambda x: functional.pdist(x.flatten(1))),
    "complex": ((3, 0, 1, 2), lambda x: torch.view_as_complex(x.unflatten(3, (2, 2)).contiguous()).abs()),
    "bits": ((1, 2, 3, 0), lambda x: x + x.gt(0).int().view(torch.int16)[..., ::2]),
    "nll_loss": ((0, 3, 1, 2), lambda x: functional.nll_loss(x, x[:, 0].detach().gt(0).long(), reduction="none")),
    "pixel_shuffle": ((1, 2, 3, 0), lambda x: functional.pixel_shuffle(x, 2)),
    "max_pool2d": ((1, 2, 3, 0), lambda x: functional.max_pool2d(x, 3, 1, 1)),
    "interpolate": ((1, 2, 3, 0), lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear")),
    "convolution": ((1, 2, 3, 0), lambda x: functional.conv2d(x, x[:, :, :3, :3])),
    "batch_norm": ((1, 2, 3, 0), lambda x: functional.batch_norm(x, None, None, training=True)),
    "view": ((1, 2, 3, 0), lambda x: x.flatten(1, 2).unflatten(0, (2, 2))),
}
"""Operators whose kernels depend on strides, each with the order of dims in which a value is computed."""


class Permuted(nn.Module):
    """A model that permutes a value and permutes it back before an operator."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.order, self.operator = PERMUTED[name]
        self.back = tuple(self.order.index(dim) for dim in range(4)) if "frames" not in name else (0, 1, 2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        moved = self.linear(x).permute(self.order).tanh()
        return self.operator(moved.permute(self.back)).square().mean()


def _splits_the_first_permute(site: Site, strategy: Strategy) -> int:
    """Prefer to split the first permute by many axes, and all other nodes by few."""
    count = sum(len(axes) for spec in (*strategy.inputs, *strategy.outputs) for axes in spec.dims)
    return count if site.name == "permute" else -count


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", PERMUTED)
def test_operators_get_the_order_of_memory_that_they_demand(name: str) -> None:
    """After a gather, operators get the strides that they need and equal one device; the plan's peak has the copies."""
    torch.manual_seed(0)
    model, inputs = Permuted(name), (torch.randn(4, 4, 4, 4),)
    program = trace(model, inputs)
    plan = greedy_plan(program, MESH, _splits_the_first_permute)
    assert plan.nodes["permute"].outputs[0].dims != plan.nodes["tanh"].inputs[0].dims
    check_plan(model, MESH, inputs, plan=plan, precise=torch.float64).raise_if_different()
    lowered = lower_program(program, plan, laptop(MESH))
    assert plan.predicted.peak_memory_bytes == peak_bytes(lowered)
