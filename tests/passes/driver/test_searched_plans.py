"""Time of a search over recipes: how the recipes that are planned share it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from autoshard import DoesNotFitError, NotAvailableError, Recipe
from autoshard.ir.execution import Execution
from autoshard.ir.request import Request
from passes.driver import searched_plans
from passes.driver.planner import Planner
from passes.driver.recipe_plans import Planned
from passes.solver.search_control import Ceiling


@pytest.mark.parametrize(("late_at", "tried"), [(1, 1), (2, 2), (9, 3)])
def test_where_a_recipe_does_not_fit_others_are_planned_until_the_time_is_up(
    late_at: int, tried: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All under one ceiling."""
    asked: list[Ceiling] = []

    def planned(planner: Planner, *_: Any, in_time: bool) -> None:
        assert in_time
        assert planner.ceiling is not None
        asked.append(planner.ceiling)
        if len(asked) == late_at:
            planner.ceiling.until = 0.0
        raise DoesNotFitError("it does not fit.", smallest_bytes=1)

    monkeypatch.setattr(searched_plans, "plan_recipe", planned)
    monkeypatch.setattr(searched_plans, "meshes_for", lambda *_: [])
    shapes = {Recipe(data=2**n): SimpleNamespace(objective=1.0, recipe=Execution(data=2**n)) for n in range(3)}
    request = Request(nn.Linear(2, 2), (torch.zeros(8, 2),), {}, grad=True)
    search = SimpleNamespace(problem=SimpleNamespace(cluster=None, base=Execution()))
    found, failure = searched_plans._fastest(Planner(), request, cast(Any, search), cast(Any, shapes), lambda: None)
    assert found is None
    assert isinstance(failure, DoesNotFitError)
    assert len(asked) == tried
    assert all(each is asked[0] for each in asked)


@pytest.mark.parametrize(("is_cut", "step_s", "is_taken"), [(True, 1.6, False), (True, 1.4, True), (False, 1.6, True)])
def test_what_is_far_slower_than_its_recipe_when_time_is_up_is_no_plan(
    is_cut: bool, step_s: float, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe's price is then given instead; a search that ended by itself found what it found."""

    def planned(planner: Planner, *_: Any, in_time: bool) -> Planned:
        assert planner.ceiling is not None
        planner.ceiling.has_cut = is_cut
        plan = SimpleNamespace(was_interrupted=False, predicted=SimpleNamespace(step_time_s=step_s), alternatives=None)
        return Planned(Planner(), request, None, cast(Any, plan))

    monkeypatch.setattr(searched_plans, "plan_recipe", planned)
    monkeypatch.setattr(searched_plans, "meshes_for", lambda *_: [])
    monkeypatch.setattr(searched_plans, "replace", lambda item, **_: item)
    shapes = {Recipe(data=2): SimpleNamespace(objective=1.0, recipe=Execution(data=2))}
    request = Request(nn.Linear(2, 2), (torch.zeros(8, 2),), {}, grad=True)
    search = SimpleNamespace(problem=SimpleNamespace(cluster=None, base=Execution()))
    found, failure = searched_plans._fastest(Planner(), request, cast(Any, search), cast(Any, shapes), lambda: None)
    assert (found is not None) is is_taken
    assert is_taken or (isinstance(failure, NotAvailableError) and "1.6 s a step; give it more time" in str(failure))
