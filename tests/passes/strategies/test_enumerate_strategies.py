"""The search space holds the strategies that the rules admit, and pruning loses no plan."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autoshard.ir.mesh import Mesh
from autoshard.ir.program import Program
from autoshard.ir.spec import Reduction
from autoshard.rules.enumeration import Strategy, enumerate_strategies
from autoshard.tracing import trace
from passes.lowering.lower_program import prepare
from passes.memory.liveness import find_lifetimes
from passes.planning.build_assignment import build_problem
from passes.planning.search import Search
from passes.strategies.enumerate_strategies import EnumerateStrategies, SearchSpace
from passes.strategies.fold_blocks import fold_blocks
from passes.strategies.price import Prices
from tests.passes.blocks import blocks_program, h100s, perceptron_program


class Widths(nn.Module):
    """One call on many widths, with and without divisibility by the mesh's axes."""

    def forward(self, xs: list[torch.Tensor]) -> torch.Tensor:
        total = torch.zeros(())
        for x in xs:
            total = total + (torch.softmax(x, 1) @ x.transpose(0, 1)).view(-1).square().sum()
            total = total + nn.functional.conv1d(x[None], torch.ones(6, 6, 7), padding=3).square().sum()
        return total


def widths_program() -> Program:
    """`Widths` with 1 to 40 columns."""
    return trace(Widths(), ([torch.zeros(6, width) for width in (1, 2, 3, 4, 5, 6, 8, 9, 12, 24, 30, 36, 40)],), {})


@pytest.mark.parametrize("mesh", [Mesh({"a": 2, "b": 2}), Mesh({"a": 2, "b": 3}), Mesh({"a": 4})], ids=str)
def test_rules_that_share_strategies_have_the_same(mesh: Mesh) -> None:
    """Calls of other sizes share the strategies that each rule would enumerate alone, in order."""
    program = prepare(widths_program())
    space = EnumerateStrategies(mesh)(program)
    calls = [site for site in space.sites.values() if site.rule is not None]
    assert len({id(site.strategies) for site in calls}) < len({site.call for site in calls})
    for site in calls:
        assert site.rule is not None
        assert _specs(site.strategies) == _specs(enumerate_strategies(site.rule, mesh))


def _specs(strategies: list[Strategy] | tuple[Strategy, ...]) -> list[tuple]:
    return [(strategy.inputs, strategy.outputs) for strategy in strategies]


def test_pruning_leaves_reductions_that_the_program_makes() -> None:
    """A view carries a maximum only in front of a consumer of maxima."""
    assert _reductions(EnumerateStrategies(Mesh({"a": 2}), prune=True)(prepare(blocks_program()))) == {Reduction.SUM}
    program = trace(_Highest(), (torch.zeros(4, 4),), {})
    assert _reductions(EnumerateStrategies(Mesh({"a": 2}), prune=True)(prepare(program))) == {
        Reduction.SUM,
        Reduction.MAX,
    }


class _Highest(nn.Module):
    """The highest of each row, as a column."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.amax(1).view(-1, 1)


def _reductions(space: SearchSpace) -> set[Reduction]:
    specs = [
        spec
        for site in space.sites.values()
        for strategy in site.strategies
        for spec in (*strategy.inputs, *strategy.outputs)
    ]
    return {reduction for spec in specs for _, reduction in spec.partial}


@pytest.mark.parametrize("mesh", [Mesh({"a": 2}), Mesh({"a": 2, "b": 2})], ids=str)
def test_pruning_loses_no_plan(mesh: Mesh) -> None:
    """The pruned space has the optimum of the whole space."""
    whole, pruned = (_optimum(perceptron_program(), EnumerateStrategies(mesh, prune=prune)) for prune in (False, True))
    assert pruned == pytest.approx(whole, rel=1e-9)


def _optimum(program: Program, enumerate_space: EnumerateStrategies) -> float:
    space = enumerate_space(prepare(program))
    prices = Prices(h100s(space.mesh), space.mesh)
    return Search()(build_problem(space, prices, find_lifetimes(space, 0.0), fold_blocks(space))).cost
