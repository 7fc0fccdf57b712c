"""The search space holds the strategies that the rules admit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autoshard.ir.mesh import Mesh
from autoshard.ir.program import Program
from autoshard.rules.enumeration import Strategy, enumerate_strategies
from autoshard.tracing import trace
from passes.lowering.lower_program import prepare
from passes.preparation.insert_fan_outs import is_gradient_fan_out
from passes.strategies.enumerate_strategies import EnumerateStrategies
from tests.passes.layouts import traced_of


class Widths(nn.Module):
    """Softmax, products and convolutions of inputs of many widths, some of which the mesh's axes divide."""

    def forward(self, xs: list[torch.Tensor]) -> torch.Tensor:
        total = torch.zeros(())
        for x in xs:
            total = total + (torch.softmax(x, 1) @ x.transpose(0, 1)).view(-1).square().sum()
            total = total + nn.functional.conv1d(x[None], torch.ones(6, 6, 7), padding=3).square().sum()
        return total


def widths_program() -> Program:
    """`Widths` traced with 13 inputs of 1 to 40 columns."""
    return trace(Widths(), ([torch.zeros(6, width) for width in (1, 2, 3, 4, 5, 6, 8, 9, 12, 24, 30, 36, 40)],), {})


@pytest.mark.parametrize("mesh", [Mesh({"a": 2, "b": 2}), Mesh({"a": 2, "b": 3}), Mesh({"a": 4})], ids=str)
def test_rules_that_share_strategies_have_the_same(mesh: Mesh) -> None:
    """Calls of different sizes share strategies, which equal, in order, the strategies of each call's own rule."""
    program = prepare(widths_program())
    space = EnumerateStrategies(mesh)(program)
    calls = [site for site in space.sites.values() if site.rule is not None]
    assert len({id(site.strategies) for site in calls}) < len({site.call for site in calls})
    for site in calls:
        assert site.rule is not None
        assert _specs(site.strategies) == _specs(enumerate_strategies(site.rule, mesh))


def _specs(strategies: list[Strategy] | tuple[Strategy, ...]) -> list[tuple]:
    return [(strategy.inputs, strategy.outputs) for strategy in strategies]


@pytest.mark.parametrize("sums", [False, True])
def test_a_step_without_micro_batches_reduces_gradients_in_the_backward(sums: bool) -> None:
    """A gradient that the update reads may stay a partial sum only if the step sums it over micro-batches."""
    program = prepare(traced_of(nn.Linear(8, 8), (torch.zeros(4, 8),), updates=True))
    space = EnumerateStrategies(Mesh({"a": 2}), sums_gradients=sums)(program)
    sites = [site for site in space.sites.values() if is_gradient_fan_out(site.node)]
    assert len(sites) == 2
    for site in sites:
        assert any(strategy.outputs[0].partial for strategy in site.strategies) is sums
