"""What else a recipe could do, and what it then costs: `why_not`, `limits` and `explain` for plans of recipes.

A feature is a restriction of the searched fields. Where the plan's recipe does without it, the fastest recipes that
have it are searched for; where it has it, the fastest without. `limits` searches with more memory, or for hardware of
which one part is faster; `explain` among the recipes that give a value another spec. Every figure is the price of a
recipe that fits, and keeps the plan's own constraints.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from autoshard.errors import NotAvailableError
from autoshard.ir.answers import Alternative, Explanation, Limits, Outcome, Variant, WhyNot
from autoshard.ir.execution import Execution
from autoshard.ir.plan import Plan
from autoshard.ir.recipe import Recipe
from passes.questions.feature_names import feature_named
from passes.questions.what_if import MORE_MEMORY, cheapest_first, memory_worth, outcome_of
from passes.recipe_search.explain_recipe import (
    find_value,
    kernels_of,
    spec_families,
    spec_of,
    value_costs,
    value_memory,
)
from passes.recipe_search.recipe_problem import RecipeProblem
from passes.recipe_search.recipe_space import Only
from passes.recipe_search.richer_problems import richer_problems
from passes.recipes.recipe_plan import predict_recipe
from passes.sections.price_model import PricedModel
from passes.solver.search_control import Ceiling


@dataclass(frozen=True, slots=True)
class Feature:
    """Something that a recipe may do.

    Args:
        ways: the values of fields that do it, by a name for each way; sizes of axes are any over one.
        without: those that do not: of any of these.
    """

    ways: Mapping[str, Only]
    without: tuple[Only, ...]

    def is_used(self, recipe: Recipe) -> bool:
        """Whether a recipe does it."""
        return any(all(getattr(recipe, name) in values for name, values in way.items()) for way in self.ways.values())


class _Several(Collection[object]):
    """The sizes over one. A range would look through all of them for None."""

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int) and value in self._sizes

    def __iter__(self) -> Iterator[int]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    _sizes = range(2, 2**31)


_MANY = _Several()


def _axis(name: str) -> Feature:
    return Feature({name: {name: _MANY}}, ({name: (1,)},))


def _sharding(name: str, zero: int) -> Feature:
    others = tuple(stage for stage in range(4) if stage != zero)
    return Feature({name: {"zero": (zero,), **({} if zero else {"data": _MANY})}}, ({"zero": others},))


FEATURES: Mapping[str, Feature] = {
    "data": _sharding("data", 0),
    "zero-1": _sharding("zero-1", 1),
    "zero-2": _sharding("zero-2", 2),
    "fsdp": _sharding("fsdp", 3),
    "hsdp": Feature({"hsdp": {"zero": (3,), "zero_group": _MANY}}, ({"zero": (0, 1, 2)}, {"zero_group": (None,)})),
    **{name: _axis(name) for name in ("tensor", "context", "expert", "pipeline")},
    "sequence": Feature({"sequence": {"sequence_parallel": (True,)}}, ({"sequence_parallel": (False,)},)),
    "recompute": Feature(
        {
            "recompute of attention's core": {"recompute": ("selective",)},
            "recompute of blocks": {"recompute": ("full",)},
        },
        ({"recompute": ("none",)},),
    ),
    "offload": Feature({"offload of activations": {"offload": ("activations",)}}, ({"offload": ("none",)},)),
}
"""What `why_not` may be asked about."""


@dataclass(frozen=True, slots=True)
class RecipeAlternatives:
    """Answers questions about the plan of the best recipe of a problem.

    Args:
        problem: whose recipe it is.
        priced: its model.
        time_budget_s: seconds of each search.
    """

    problem: RecipeProblem
    priced: PricedModel
    time_budget_s: float

    def why_not(self, plan: Plan, feature: str) -> WhyNot:
        """See `Plan.why_not`.

        Raises:
            NotAvailableError: time ran out before anything was priced.
        """
        assert plan.recipe is not None, "recipes are asked about"
        feature = feature_named(feature)
        asked = FEATURES[feature]
        if not asked.is_used(plan.recipe):
            return self._answer(plan, feature, self._with(feature, asked))
        answer = self._answer(plan, feature, [self._without(feature, asked)])
        return replace(answer, used=f"in its recipe ({plan.recipe.words})")

    def forecast(self, plan: Plan, feature: str) -> WhyNot:
        """The answer for a plan of specs: the fastest recipes that do something, beside the fastest that does not.

        Raises:
            NotAvailableError: as `why_not`.
        """
        feature = feature_named(feature)
        asked = FEATURES[feature]
        answer = self._answer(plan, feature, self._with(feature, asked))
        return replace(answer, reference=self._without(feature, asked))

    def _with(self, feature: str, asked: Feature) -> list[Variant | None]:
        """The best recipe of each way to do something."""
        ways = {} if self._missing(feature) else asked.ways
        return [self._variant(name, only=only) for name, only in ways.items()]

    def _without(self, feature: str, asked: Feature) -> Variant | None:
        """The best recipe that does not do something."""
        found = [self._variant(f"without {feature}", only=only) for only in asked.without]
        return min((item for item in found if item is not None), key=cheapest_first, default=None)

    def _answer(self, plan: Plan, feature: str, found: Sequence[Variant | None]) -> WhyNot:
        """What was found beside a plan."""
        none = f"no recipe for {self.problem.cluster.size} devices and this batch has it"
        return WhyNot(
            feature=feature,
            used="",
            chosen=outcome_of(plan),
            variants=tuple(sorted((item for item in found if item is not None), key=cheapest_first)),
            memory_budget=plan.memory_budget,
            missing=self._missing(feature) or none,
        )

    def explain(self, plan: Plan, name: str) -> Explanation:
        """See `Plan.explain`: each other spec with the fastest recipe that gives it.

        Raises:
            NotAvailableError: time ran out before anything was priced.
        """
        assert plan.recipe is not None, "recipes are asked about"
        priced, problem = self.priced, self.problem
        value, chosen = find_value(priced, name), problem.base.of(plan.recipe)
        families = (
            [best for only in family if (best := self._best(name, problem, only=only)) is not None]
            for family in spec_families(priced, value, chosen)
        )
        found = [min(family, key=cheapest_first) for family in families if family]

        def alternative(outcome: Outcome) -> Alternative:
            assert outcome.recipe is not None, "it is a recipe's"
            return Alternative(spec_of(priced, value, problem.base.of(outcome.recipe)), **_figures(outcome))

        return Explanation(
            name=name,
            shape=value.shape,
            alike=value.alike,
            chosen=alternative(outcome_of(plan)),
            others=tuple(sorted(map(alternative, found), key=cheapest_first)),
            memory_budget=plan.memory_budget,
            costs=value_costs(priced, value, chosen, problem.cluster, problem.model),
            memory=value_memory(priced, value, chosen, problem.cluster),
            kernels=kernels_of(priced, value, chosen),
        )

    def limits(self, plan: Plan) -> Limits:
        """See `Plan.limits`.

        Raises:
            NotAvailableError: time ran out before anything was priced.
        """
        chosen = outcome_of(plan)
        known = None if plan.recipe is None else self.problem.base.of(plan.recipe)
        found = {name: self._variant(name, other, known=known) for name, other in richer_problems(self.problem)}
        more = found[MORE_MEMORY]
        worth = None if more is None else memory_worth(chosen, more, self.problem.memory_limit)
        return Limits(chosen, tuple(item for item in found.values() if item is not None), plan.memory_budget, worth)

    def _missing(self, feature: str) -> str:
        """Why no recipe of the model can do something; "" where one may."""
        problem, counted = self.problem, self.problem.counted
        if feature == "expert" and not counted.has_experts:
            return "the model has no experts to share out"
        if feature == "context" and not counted.tokens:
            return "the model's inputs are no tokens, of which ranks could share a sequence"
        if feature in ("pipeline", "recompute", "offload") and not counted.blocks:
            return "the model has no list of blocks, which are what stages are made of, recomputed and offloaded"
        if feature != "offload":
            return ""
        return "" if problem.cluster.device.host_link is not None else "the device's data have no host link"

    def _variant(
        self,
        name: str,
        problem: RecipeProblem | None = None,
        *,
        only: Only | None = None,
        known: Execution | None = None,
    ) -> Variant | None:
        """The best recipe of a problem (default: the plan's) in words, see `_best`."""
        best = self._best(name, problem or self.problem, only=only, known=known)
        if best is None or best.recipe is None:
            return None
        return Variant(f"{name}: {best.recipe.words}", **_figures(best))

    def _best(
        self,
        name: str,
        problem: RecipeProblem,
        *,
        only: Only | None = None,
        known: Execution | None = None,
    ) -> Outcome | None:
        """The best recipe of a problem, see `RecipeProblem.best`, or the one with the least memory; None for none."""
        found = problem.best(only=only, known=known, ceiling=Ceiling.within(self.time_budget_s))
        if found.recipe is not None:
            step = predict_recipe(problem.counted, found.recipe, problem.cluster, problem.model)
            return Outcome(
                fits=True,
                objective=found.objective,
                lower_bound=found.lower_bound,
                step_time_s=step.step_time_s,
                peak_memory_bytes=step.peak_memory_bytes,
                breakdown=step.breakdown,
                recipe=found.recipe.recipe,
            )
        if not found.is_complete:
            raise NotAvailableError(f"{self.time_budget_s:g} s ended before any recipe was priced ({name}).")
        least = problem.smallest(only=only, ceiling=Ceiling.within(self.time_budget_s))
        if least.recipe is None:
            return None
        return Outcome(fits=False, smallest_bytes=int(least.objective), recipe=least.recipe.recipe)


def _figures(outcome: Outcome) -> dict[str, Any]:
    return {item.name: getattr(outcome, item.name) for item in fields(outcome)}
