"""Search the fastest recipe under another framework's runtime, for a plan and again for questions about the plan.

Such a plan predicts a step of the recipe under that runtime, and has no specs. `compile` does not run it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autoshard.errors import AutoshardError, DoesNotFitError, NotAvailableError, RecipeError
from autoshard.ir.kernels import Kernels
from autoshard.ir.plan import Plan
from autoshard.ir.text import format_bytes
from cost_models.hardware import Cluster
from passes.driver.pricing import price_execution
from passes.driver.recipe_search import RecipeSearch
from passes.planning.build_assignment import PlanningProblem
from passes.questions.ask import Questions
from passes.questions.change import Change, Fields
from passes.search.search_recipes import FoundRecipe
from passes.solver.search_control import Ceiling


def price_found(search: RecipeSearch, found: FoundRecipe, kinds: Mapping[str, FoundRecipe]) -> Plan:
    """Return the plan of the recipe `found`, with its price under the call's runtime.

    `found` and `kinds` are the results of `search.run`. `kinds` gives the prices of known recipes, by name.
    """
    assert found.recipe is not None, "a recipe was found"
    problem = search.problem
    call, runtime = search.call, search.call.runtime
    assert call.example_inputs is not None, "plan takes example inputs"
    assert runtime is not None, "compile runs plans, and not prices"
    chosen = price_execution(call.model, problem.cluster, found.recipe, call.example_inputs, call.loss_fn)
    return replace(
        chosen,
        runtime=runtime.name,
        objective=found.objective,
        lower_bound=found.lower_bound,
        search_time_s=found.search_time_s,
        was_interrupted=found.was_interrupted,
        was_cut=found.was_cut,
        memory_budget=None if math.isinf(problem.memory_limit) else int(problem.memory_limit),
        baselines={
            name: each.objective if each.recipe else None
            for name, each in kinds.items()
            if each.recipe or each.is_complete
        },
        alternatives=Questions(PriceAgain(search)),
    )


@dataclass(frozen=True, slots=True)
class PriceAgain:
    """Searches recipes again with one change, and prices the fastest recipe."""

    search: RecipeSearch

    @property
    def cluster(self) -> Cluster:
        """The hardware that recipes are priced for."""
        return self.search.problem.cluster

    def problems(self) -> Sequence[PlanningProblem]:
        """Return an empty tuple: recipes are priced without planning problems over specs."""
        return ()

    def missing(self, feature: str) -> str:
        """Return the reason why no recipe of the model can have a feature, or "" if a recipe may have it."""
        return self.search.problem.missing(feature)

    def kernels(self, plan: Plan) -> Kernels:
        """Return the Triton kernels that the price of `plan` counts."""
        return plan.predicted.kernels

    def __call__(self, plan: Plan, change: Change) -> Plan:
        """Search again with a change, and return the plan of the fastest recipe, with its price.

        `change.specs` and `change.roles` do not apply to recipes.
        """
        problem, known = self.search.problem, None
        if change.memory != 1.0:
            problem = problem.within(change.memory * problem.memory_limit)
        if change.faster is not None:
            problem = replace(problem, cluster=change.faster(problem.cluster) or problem.cluster)
        if not change.fields and plan.recipe is not None:
            known = problem.base.of(plan.recipe)
        search = replace(self.search, problem=problem)
        found = problem.best(only=change.fields, known=known, ceiling=Ceiling.within(search.time_budget_s))
        if found.recipe is None:
            raise error_of_no_recipe(search, found, change.fields)
        return price_found(search, found, {})


def error_of_no_recipe(search: RecipeSearch, found: FoundRecipe, only: Fields) -> AutoshardError:
    """Return the error to raise after a search that found no recipe.

    `only` has the allowed values of fields. The message says that time ran out, that no recipe has these values, or
    that no recipe with these values fits into memory.
    """
    names = ", ".join(only)
    if not found.is_complete:
        return NotAvailableError(f"{search.time_budget_s:g} s ended before any recipe was priced ({names}).")
    least = search.problem.smallest(only=only, ceiling=Ceiling.within(search.time_budget_s))
    if least.recipe is None:
        return RecipeError(f"No recipe for these devices and this batch has such values of {names}.")
    return DoesNotFitError(
        f"No recipe with such values of {names} fits; the smallest needs {format_bytes(least.objective)} per device.",
        smallest_bytes=int(least.objective),
    )
