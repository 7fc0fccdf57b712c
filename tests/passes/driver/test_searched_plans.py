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


@pytest.mark.parametrize(("recipes", "given"), [(1, [(60.0, 60.0)]), (3, [(60.0, 30.0), (30.0, 60.0)])])
def test_where_the_first_recipe_does_not_fit_others_have_the_rest_of_the_time(
    recipes: int, given: list[tuple[float, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first has half of it, or all if there is no other; once the time is over, none is planned any more."""
    asked, clock = [], [0.0]

    def planned(planner: Planner, request: Any, meshes: Any, shape: Any, batch: Any, until: float) -> None:
        asked.append((planner.time_budget_s, until))
        clock[0] = until
        raise DoesNotFitError("it does not fit.", smallest_bytes=1)

    monkeypatch.setattr(searched_plans, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(searched_plans, "plan_recipe", planned)
    monkeypatch.setattr(searched_plans, "meshes_for", lambda *_: [])
    shapes = {Recipe(data=2**n): SimpleNamespace(objective=1.0, recipe=Recipe(data=2**n)) for n in range(recipes)}
    request = Request(nn.Linear(2, 2), (torch.zeros(8, 2),), {}, grad=True)
    search = SimpleNamespace(problem=SimpleNamespace(cluster=None, base=Execution()))
    found, failure = searched_plans._fastest(Planner(), request, cast(Any, search), cast(Any, shapes), lambda: None)
    assert found is None
    assert isinstance(failure, DoesNotFitError)
    assert asked == given


@pytest.mark.parametrize(("took_s", "step_s", "is_taken"), [(60.0, 1.6, False), (60.0, 1.4, True), (59.0, 1.6, True)])
def test_what_is_far_slower_than_its_recipe_when_time_is_up_is_no_plan(
    took_s: float, step_s: float, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe's price is then given instead; a search that ended by itself found what it found."""
    clock = [0.0]

    def planned(*_: Any) -> Planned:
        clock[0] = took_s
        plan = SimpleNamespace(was_interrupted=False, predicted=SimpleNamespace(step_time_s=step_s), alternatives=None)
        return Planned(Planner(), request, None, cast(Any, plan))

    monkeypatch.setattr(searched_plans, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(searched_plans, "plan_recipe", planned)
    monkeypatch.setattr(searched_plans, "meshes_for", lambda *_: [])
    monkeypatch.setattr(searched_plans, "replace", lambda item, **_: item)
    shapes = {Recipe(data=2): SimpleNamespace(objective=1.0, recipe=Recipe(data=2))}
    request = Request(nn.Linear(2, 2), (torch.zeros(8, 2),), {}, grad=True)
    search = SimpleNamespace(problem=SimpleNamespace(cluster=None, base=Execution()))
    found, failure = searched_plans._fastest(Planner(), request, cast(Any, search), cast(Any, shapes), lambda: None)
    assert (found is not None) is is_taken
    assert is_taken or (isinstance(failure, NotAvailableError) and "1.6 s a step; give it more time" in str(failure))
