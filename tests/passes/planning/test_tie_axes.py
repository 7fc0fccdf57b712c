"""To save time, the search may tie mesh axes, that is, split the same dims over them.

Axes that a constraint or a recipe distinguishes are never tied.
"""

from __future__ import annotations

import copy
import logging

import pytest
import torch

import autoshard
from autoshard.ir.mesh import Mesh
from autoshard.ir.recipe import Recipe
from autoshard.ir.spec import P, PartitionSpec
from autoshard.rules.enumeration import Strategy
from passes.driver.plan_and_lower import plan_program, planning_problem
from passes.driver.plan_options import PlanOptions
from passes.lowering.lower_program import prepare
from passes.planning.baselines import solve_baselines
from passes.planning.search import Search
from passes.planning.tie_axes import space_in_time, tied_levels
from passes.strategies.enumerate_strategies import EnumerateStrategies, SearchSpace
from tests.passes.blocks import Perceptron, blocks_program, h100s, perceptron_program

CUBE = Mesh({"a": 2, "b": 2, "c": 2})
TESSERACT = Mesh({"a": 2, "b": 2, "c": 2, "d": 2})


def space_of(mesh: Mesh, time_budget_s: float) -> SearchSpace:
    return space_in_time(every_strategy(mesh), prepare(blocks_program()), tied_levels(mesh), time_budget_s)


def every_strategy(mesh: Mesh) -> EnumerateStrategies:
    return EnumerateStrategies(mesh, wide_gradients=True)


def count(space: SearchSpace) -> int:
    return sum(len(site.strategies) for site in space.sites.values())


def specs_of(space: SearchSpace) -> list[PartitionSpec]:
    strategies: list[Strategy] = [strategy for site in space.sites.values() for strategy in site.strategies]
    return [spec for strategy in strategies for spec in (*strategy.inputs, *strategy.outputs)]


def test_on_two_axes_nothing_is_tied(caplog: pytest.LogCaptureFixture) -> None:
    """On meshes of one or two axes, no axes are tied, even without any time."""
    for mesh in (Mesh({"a": 4}), Mesh({"a": 2, "b": 2})):
        free = every_strategy(mesh)(prepare(blocks_program()))
        found = space_of(mesh, 0.0)
        assert {name: site.strategies for name, site in found.sites.items()} == {
            name: site.strategies for name, site in free.sites.items()
        }
    assert not caplog.records


def test_four_axes_have_no_more_strategies_than_two(caplog: pytest.LogCaptureFixture) -> None:
    """In little time, the three outer of four axes are tied, and a warning names them.

    There are at most as many strategies as on a mesh of 8 times 2 devices.
    """
    tied = space_of(TESSERACT, 1.0)
    two = space_of(Mesh({"a": 8, "d": 2}), 60.0)
    assert count(tied) <= count(two)
    for spec in specs_of(tied):
        assert len({(spec.dim_of(axis), spec.reduction_over(axis)) for axis in "abc"}) == 1
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "axes 'a', 'b', 'c' split the same dims of all tensors" in record.message


def test_more_time_ties_less(caplog: pytest.LogCaptureFixture) -> None:
    """In little time, three axes have less than a third of the strategies of free axes.

    With more time all axes are free.
    """
    spaces = [space_of(CUBE, seconds) for seconds in (0.5, 1e6)]
    free = every_strategy(CUBE)(prepare(blocks_program()))
    assert count(spaces[0]) < count(spaces[1]) / 3
    assert count(spaces[1]) == count(free)
    for name, site in spaces[0].sites.items():
        assert set(site.strategies) <= set(spaces[1].sites[name].strategies)
    assert len(caplog.records) == 1


def test_axes_that_are_told_apart_are_not_tied() -> None:
    """Axes that a constraint, an earlier plan, a recipe or the order in a spec distinguishes are not tied."""
    assert tied_levels(TESSERACT)[1:] == [
        (("a", "b"), ("c",), ("d",)),
        (("a", "b", "c"), ("d",)),
    ]
    assert tied_levels(TESSERACT, [P("b"), P(("c", "d"))])[1:] == [(("a",), ("b",), ("c", "d"))]
    assert tied_levels(TESSERACT, [P(("a", "b")), P("c", "d")])[1:] == [(("a", "b"), ("c",), ("d",))]
    assert len(tied_levels(TESSERACT, [P(("b", "a"), "c", "d")])) == 1
    assert len(tied_levels(Mesh({"a": 2, "b": 2, "c": 2, "model": 2}), recipe=Recipe(tensor=2))) == 1
    assert tied_levels(TESSERACT, recipe=Recipe(recompute="full")) == tied_levels(TESSERACT)
    options = PlanOptions(constraints={"first.weight": P(None, "b")})
    before = plan_program(perceptron_program(), CUBE, h100s(CUBE), options)
    assert len(tied_levels(CUBE, before=before)) == 1


def test_a_constraint_on_one_axis_holds_on_many() -> None:
    """A constraint on one of three axes holds in the plan, even in little time."""
    options = PlanOptions(constraints={"first.weight": P(None, "b")}, time_budget_s=0.5)
    plan = plan_program(perceptron_program(), CUBE, h100s(CUBE), options)
    assert plan.parameters["first.weight"].spec == P(None, "b")


def test_known_recipes_are_priced_on_tied_axes() -> None:
    """All four known recipes have the same costs on tied axes as on free axes, because the inner axis stays free."""
    costs = []
    for seconds in (0.5, 1e6):
        options = PlanOptions(time_budget_s=seconds)
        found = solve_baselines(planning_problem(perceptron_program(), CUBE, h100s(CUBE), options), Search(), {})
        costs.append({name: solution.cost for name, solution in found.items() if solution is not None})
    assert len(costs[1]) == 4
    assert costs[0] == pytest.approx(costs[1], rel=1e-3)


def test_four_axes_train_as_one_device(caplog: pytest.LogCaptureFixture) -> None:
    """On four axes, three of which are tied, loss and gradients equal those of one device."""
    torch.manual_seed(0)
    model, rows = Perceptron(), torch.randn(32, 16)
    plain = copy.deepcopy(model)
    constraints = {"first.weight": P(("a", "b", "c"), "d"), "input:*": P(("a", "b", "c"))}
    sharded = autoshard.compile(model, TESSERACT, constraints=constraints, time_budget_s=0.1)
    found, expected = sharded(rows, rows), plain(rows, rows)
    torch.testing.assert_close(found, expected)
    found.backward()
    expected.backward()
    assert sharded.specs["first.weight"] == constraints["first.weight"]
    assert "'a', 'b', 'c' split the same dims" in caplog.text
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad)
