"""`plan(global_batch=)` for our own runtime: specs are searched on the meshes of the fastest recipes.

The search over recipes is the outer search: mesh, stages, schedule and micro-batches. What it finds is a restriction of
the search over specs like a user's recipe (`recipe_plans`), and what that finds is the plan.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

from torch import nn

from autoshard.errors import AutoshardError, DoesNotFitError, NotAvailableError, RecipeError
from autoshard.ir.recipe import Recipe, is_several
from autoshard.ir.request import Request
from autoshard.ir.text import format_time
from passes.driver.planner import Planner
from passes.driver.recipe_plans import Planned, meshes_for, plan_recipe
from passes.driver.recipe_search import RecipeAnswers, RecipeSearch
from passes.recipe_search.search_recipes import FoundRecipe

_LOGGER = logging.getLogger(__name__)


def plan_searched(
    planner: Planner, request: Request, search: RecipeSearch, check_stages: Callable[[], None]
) -> Planned:
    """The fastest plan on the meshes of the fastest recipes, as a search over recipes finds them.

    The price of the fastest recipe, where no plan of specs is found in time or none fits: its `forecast` says why.

    Args:
        planner: with all else that was asked for.
        request: a call with any batch.
        search: for recipes.
        check_stages: raises `NotAvailableError` where stages do not go with what was asked for.
    """
    start = time.monotonic()
    search, found, kinds = search.run()
    why = search.forecast
    if found.was_interrupted:
        why = "Ctrl-C ended the search before specs were planned"
    elif _takes_too_long(request.model, found, planner.time_budget_s):
        why = (
            f"the search for the specs of its stages would take some {_seconds(request.model, found):.0f} s, and "
            f"time_budget_s={planner.time_budget_s:g}; give it more time, or plan with recipe=plan.recipe"
        )
    if why:
        return Planned(planner, request, None, search.price(found, kinds, why))
    planner, ceiling = planner.begun()
    planned, failure = _fastest(planner, request, search, _shapes([found, *kinds.values()], search), check_stages)
    was_cut = found.was_cut or ceiling.has_cut
    if planned is None:
        why = f"time_budget_s={planner.time_budget_s:g} was up: {failure}" if ceiling.has_cut else str(failure)
        return Planned(planner, request, None, replace(search.price(found, kinds, why), was_cut=was_cut))
    return replace(planned, plan=replace(planned.plan, search_time_s=time.monotonic() - start, was_cut=was_cut))


_FREE = ("zero", "sequence_parallel", "recompute", "offload")
"""Fields that the search over specs decides, at its own prices, where no constraint does."""


def _shapes(found: Sequence[FoundRecipe], search: RecipeSearch) -> dict[Recipe, FoundRecipe]:
    """Recipes without what the search over specs decides, the fastest first, each with the one that it is of."""
    pinned = search.problem.pinned
    fixed = {*pinned, "recompute"} if "offload" in pinned else pinned  # what is offloaded is what is not recomputed
    free = {name: None for name in _FREE if name not in fixed}
    shapes: dict[Recipe, FoundRecipe] = {}
    for each in sorted(found, key=lambda each: each.objective):
        if each.recipe is not None:
            shapes.setdefault(replace(each.recipe.recipe, **free, stage_layers=None), each)
    return shapes


_MOST_SHAPES, _NEAR, _SHARE_OF_OTHERS = 3, 1.5, 0.5
"""Meshes that are planned at most, how much slower their recipes may be than the fastest, and the part of the time
that all may take (`_seconds`): where the first is planned, the others are only as good as they are quick to plan."""

_SECONDS_PER_PARAMETER, _SECONDS_WITHOUT_STAGES = 0.2, 20.0
"""Planning takes so long, about, for each parameter; without stages at most so long, as alike blocks are left out."""


def _seconds(model: nn.Module, found: FoundRecipe) -> float:
    """How long the search for the specs of a recipe takes, about; the same on every machine."""
    assert found.recipe is not None, "a recipe was found"
    each = _SECONDS_PER_PARAMETER * len(list(model.parameters()))
    return each if found.recipe.pipeline > 1 else min(each, _SECONDS_WITHOUT_STAGES)


def _takes_too_long(model: nn.Module, found: FoundRecipe, time_budget_s: float) -> bool:
    """Whether a recipe has stages whose specs are not searched in time; without any a search ends with what it has."""
    assert found.recipe is not None, "a recipe was found"
    return found.recipe.pipeline > 1 and _seconds(model, found) > time_budget_s


def _fastest(
    planner: Planner,
    request: Request,
    search: RecipeSearch,
    shapes: Mapping[Recipe, FoundRecipe],
    check_stages: Callable[[], None],
) -> tuple[Planned | None, AutoshardError | None]:
    """The fastest plan of some recipes, None where none has one; and why the first that has none has none."""
    planner, ceiling = planner.begun()
    least, needed_s = min(each.objective for each in shapes.values()), 0.0
    plans: list[Planned] = []
    failure: AutoshardError | None = None
    for shape, found in shapes.items():
        needed_s += _seconds(request.model, found)
        is_late, is_slow = needed_s > _SHARE_OF_OTHERS * planner.time_budget_s, found.objective > _NEAR * least
        if (plans and (is_late or is_slow or len(plans) == _MOST_SHAPES)) or ((plans or failure) and ceiling.cuts()):
            break
        if _takes_too_long(request.model, found, planner.time_budget_s):
            continue
        try:
            if is_several(shape.pipeline):
                check_stages()
            meshes = meshes_for(shape, search.problem.cluster, None)
            planned = plan_recipe(planner, request, meshes, shape, search.problem.base.batch, in_time=True)
            if ceiling.has_cut and planned.step_time_s > _NEAR * found.objective:
                raise NotAvailableError(
                    f"the best specs found by then take {format_time(planned.step_time_s)} a step; give it more time, "
                    "or plan with recipe=plan.recipe"
                )
        except (DoesNotFitError, RecipeError, NotAvailableError) as error:
            _LOGGER.debug("%s: %s", shape.words, error)
            failure = failure or error
            continue
        answers = RecipeAnswers(search, found) if planned.program is None else None
        plans.append(replace(planned, plan=replace(planned.plan, alternatives=answers)))
        if planned.plan.was_interrupted:
            break
    return min(plans, key=attrgetter("step_time_s"), default=None), failure
