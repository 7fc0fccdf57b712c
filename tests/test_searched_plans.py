"""Time of a search over recipes: how the recipes that are planned share it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from autoshard import DoesNotFitError, Recipe, searched_plans
from autoshard.planner import Planner
from autoshard.runtime.sharded_module import Request


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
    search = SimpleNamespace(problem=SimpleNamespace(cluster=None))
    found, failure = searched_plans._fastest(Planner(), request, cast(Any, search), cast(Any, shapes), lambda: None)
    assert found is None
    assert isinstance(failure, DoesNotFitError)
    assert asked == given
