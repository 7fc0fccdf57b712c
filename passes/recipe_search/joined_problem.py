"""The best recipe of a model on a joined cluster: on any of its islands, in any order along the pipeline.

Each choice of islands in an order is a branch of the search: of one island alone it is that of `recipe_problem`, of
several that of `islands_objectives`. Islands alone are searched first, as baselines. Then several, all together: first
recipes that cut a micro-batch as the best of these does, which are few and as a rule good; then all, beginning with the
best until then, so that the bounds of all prove the best of all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import permutations

from autoshard.ir.recipe import Recipe
from cost_models.joined import JoinedCluster
from cost_models.step import StepModel, fitted
from passes.recipe_search.islands_objectives import IslandsFastest, IslandsSmallest
from passes.recipe_search.islands_pricer import IslandsPricer
from passes.recipe_search.recipe_objectives import Fastest, Smallest
from passes.recipe_search.recipe_pricer import RecipePricer
from passes.recipe_search.recipe_space import Only, RecipeSpace, keeps
from passes.recipe_search.search_recipes import Branch, FoundRecipe, Watch, search_recipes
from passes.recipes.place_islands import chosen_islands
from passes.sections.price_model import CountedModel

_BASELINES_SHARE = 0.5
"""Part of the time budget that the baselines may take, which are a good part of the search."""


@dataclass
class JoinedProblem:
    """Which recipe is the fastest on a joined cluster.

    Args:
        counted: the model.
        cluster: the cluster; devices of islands that a recipe does not pass are left idle.
        base: the global batch, and the fields that are not searched; its `islands`, if not None, are the only choice.
        memory_limits: bytes of a device of each island that recipes may take.
        least_tokens, model, pinned: see `recipe_problem.RecipeProblem`.
    """

    counted: CountedModel
    cluster: JoinedCluster
    base: Recipe
    memory_limits: tuple[float, ...]
    least_tokens: int = 128
    model: StepModel = field(default_factory=fitted)
    pinned: Only = field(default_factory=dict)
    _priced: dict[tuple[int, ...], IslandsPricer] = field(default_factory=dict, init=False)

    @cached_property
    def pricers(self) -> tuple[RecipePricer, ...]:
        """What prices recipes on each island alone."""
        return tuple(RecipePricer(self.counted, island, self.model) for island in self.cluster.islands)

    @cached_property
    def routes(self) -> tuple[tuple[int, ...], ...]:
        """The choices of islands, in order along the pipeline: those of the most islands first."""
        places = range(len(self.cluster.islands))
        if self.base.islands is not None:
            return (chosen_islands(self.base, self.cluster),)
        return tuple(route for count in reversed(places) for route in permutations(places, count + 1))

    def within(self, memory_limits: tuple[float, ...]) -> JoinedProblem:
        """The same problem with other memory limits; they share what is priced."""
        other = replace(self, memory_limits=memory_limits)
        other.pricers, other._priced = self.pricers, self._priced
        return other

    def best(
        self,
        *,
        only: Only | None = None,
        routes: Sequence[tuple[int, ...]] | None = None,
        time_budget_s: float = math.inf,
        known: Recipe | None = None,
        watch: Watch | None = None,
    ) -> FoundRecipe:
        """The fastest recipe that fits.

        Args:
            only: searched fields to the values that they may have, `{"pipeline": range(2, 65)}`.
            routes: those that are searched; None: all.
            time_budget_s, known, watch: see `search_recipes`.
        """
        end, chosen = time.monotonic() + time_budget_s, self.routes if routes is None else routes
        alone, several = ([route for route in chosen if (len(route) > 1) == more] for more in (False, True))
        aside = watch and (_at_least(watch, 0.0) if several else watch)
        first = self._search(alone, only, known, end, aside)
        return self._with_several([first], several, only, end, watch)

    def _search(
        self,
        routes: Sequence[tuple[int, ...]],
        only: Only | None,
        known: Recipe | None,
        end: float,
        watch: Watch | None,
    ) -> FoundRecipe:
        """The fastest recipe on one or another choice of islands, found by some time of `time.monotonic`."""
        branches = [self._fastest(route, self.space(route, only)) for route in routes]
        known_objective = None if known is None else self.time_s(known)
        return search_recipes(
            branches, self.fullest_bytes, time_budget_s=end - time.monotonic(), known=known,
            known_objective=known_objective, watch=watch,
        )  # fmt: skip

    def _with_several(
        self,
        parts: list[FoundRecipe],
        routes: Sequence[tuple[int, ...]],
        only: Only | None,
        end: float,
        watch: Watch | None,
    ) -> FoundRecipe:
        """The fastest recipe of the searches that were made, and of choices of several islands; see `_search`."""
        best = _best_of(parts)
        if routes and best is not None and best.recipe is not None and not best.was_interrupted:
            like = {**(only or {}), **alike(best.recipe)}
            parts = [*parts, self._search(routes, like, best.recipe, end, watch and _at_least(watch, 0.0))]
        if any(part.was_interrupted for part in parts):
            return replace(_together(parts), lower_bound=0.0, is_complete=False)
        if not routes:
            return _together(parts)
        floor, best = min((part.lower_bound for part in parts), default=math.inf), _best_of(parts)
        known = None if best is None else best.recipe
        return _together([*parts, self._search(routes, only, known, end, watch and _at_least(watch, floor))])

    def _fastest(self, route: tuple[int, ...], space: RecipeSpace) -> Branch:
        """The time of steps on a route."""
        if len(route) == 1:
            limit = self.memory_limits[route[0]]
            return Branch(space, Fastest(self.pricers[route[0]], limit, space.has_uneven))
        return Branch(space, IslandsFastest(self._pricer(route), self._limits(route)))

    def smallest(self, *, only: Only | None = None, time_budget_s: float = math.inf) -> FoundRecipe:
        """The recipe whose fullest device is the least full, of its limit; its objective is that device's bytes."""
        start, parts = time.monotonic(), list[FoundRecipe]()
        for route in (route for route in self.routes if len(route) == 1):
            space, limit = self.space(route, only), self.memory_limits[route[0]]
            least = Branch(space, Smallest(self.pricers[route[0]], space.has_uneven))
            left_s = time_budget_s - (time.monotonic() - start)
            found = search_recipes([least], self.fullest_bytes, time_budget_s=left_s)
            parts.append(replace(found, objective=found.objective / limit, lower_bound=found.lower_bound / limit))
        several = [
            Branch(self.space(route, only), IslandsSmallest(self._pricer(route), self._limits(route)))
            for route in self._several
        ]
        if several:
            known, left_s = _best_of(parts), time_budget_s - (time.monotonic() - start)
            found = search_recipes(
                several, self.fullest_bytes, time_budget_s=left_s, known=known and known.recipe,
                known_objective=known and known.objective,
            )  # fmt: skip
            parts.append(found)
        found = _together(parts)
        if found.recipe is None:
            return found
        size, _ = self.tightest(found.recipe)
        return replace(found, objective=size, lower_bound=size if found.is_complete else 0.0)

    def tightest(self, recipe: Recipe) -> tuple[float, float]:
        """Bytes of the device of a recipe that is the fullest, of its limit, and this limit."""
        places = chosen_islands(recipe, self.cluster)
        needed = map(float, self._pricer(places).memory_bytes(recipe))
        return max(zip(needed, self._limits(places), strict=True), key=lambda pair: pair[0] / pair[1])

    def _limits(self, route: tuple[int, ...]) -> list[float]:
        return [self.memory_limits[place] for place in route]

    @property
    def _several(self) -> list[tuple[int, ...]]:
        """The choices of more than one island."""
        return [route for route in self.routes if len(route) > 1]

    def admits(self, recipe: Recipe) -> bool:
        """Whether a recipe fits, and keeps the constraints. Raises RecipeError for one that does not lie here."""
        places = chosen_islands(recipe, self.cluster)
        return keeps(recipe, self.pinned) and self._pricer(places).fits(recipe, self._limits(places))

    def time_s(self, recipe: Recipe) -> float:
        """The step of a recipe."""
        return self._pricer(chosen_islands(recipe, self.cluster)).time_s(recipe)

    def limit_of(self, recipe: Recipe) -> float:
        """The limit of the devices among which a recipe's fullest rank is."""
        places = chosen_islands(recipe, self.cluster)
        needed = self._pricer(places).memory_bytes(recipe)
        return self.memory_limits[places[needed.index(max(needed))]]

    def fullest_bytes(self, recipe: Recipe) -> int:
        return max(self._pricer(chosen_islands(recipe, self.cluster)).memory_bytes(recipe))

    def _pricer(self, route: tuple[int, ...]) -> IslandsPricer:
        if route not in self._priced:
            own = [self.pricers[place] for place in route]
            self._priced[route] = IslandsPricer(self.counted, self.cluster, own, self.model)
        return self._priced[route]

    def baselines(
        self, time_budget_s: float = math.inf, watch: Watch | None = None, known: Recipe | None = None
    ) -> dict[str, FoundRecipe]:
        """The fastest recipe of each island alone; `known` is the first incumbent on the island where it lies.

        Raises:
            KeyboardInterrupt: by Ctrl-C, if no recipe was priced yet; else islands not looked at are left out.
        """
        found: dict[str, FoundRecipe] = {}
        try:
            for name, route in self._alone.items():
                own = known if known is not None and chosen_islands(known, self.cluster) == route else None
                share_s = time_budget_s / len(self._alone)
                best = self.best(routes=[route], time_budget_s=share_s, known=own, watch=watch)
                found[name] = best
                if best.was_interrupted:
                    break
        except KeyboardInterrupt:
            if _best_of(found.values()) is None:
                raise
        return found

    @property
    def _alone(self) -> dict[str, tuple[int, ...]]:
        """The choices of one island, by name."""
        islands, single = self.cluster.islands, [route for route in self.routes if len(route) == 1]
        return {f"island {route[0]} ({islands[route[0]].name}) alone": route for route in single}

    def best_of_all(
        self, *, time_budget_s: float = math.inf, known: Recipe | None = None, watch: Watch | None = None
    ) -> tuple[FoundRecipe, dict[str, FoundRecipe]]:
        """The fastest recipe, and the baselines; the fastest of these, and of `known`, is its first incumbent.

        Times are of both. An island on which no recipe lies alone, whatever memory it takes, is no baseline.
        """
        start = time.monotonic()
        kinds = self.baselines(_BASELINES_SHARE * time_budget_s, watch and _at_least(watch, 0.0), known)
        parts = list(kinds.values())
        if known is not None:
            parts.append(FoundRecipe(known, self.time_s(known), math.inf, True, False, 1, 0, 0.0))
        if len(kinds) < len(self._alone):
            found = replace(_together(parts), lower_bound=0.0, is_complete=False, was_interrupted=True)
        else:
            found = self._with_several(parts, self._several, None, start + time_budget_s, watch)
        there = {name: each for name, each in kinds.items() if each.recipe or self._has_any(self._alone[name])}
        return replace(found, search_time_s=time.monotonic() - start), there

    def _has_any(self, route: tuple[int, ...]) -> bool:
        """Whether any recipe lies on a choice of islands, whatever memory it takes."""
        return any(True for _ in self.space(route).recipes())

    def space(self, route: tuple[int, ...], only: Only | None = None) -> RecipeSpace:
        """The recipes on some islands that are searched, some fields restricted."""
        islands = [self.cluster.islands[place] for place in route]
        return RecipeSpace(
            self.counted,
            sum(island.size for island in islands),
            replace(self.base, islands=route),
            most_tensor=None if "tensor" in self.pinned else min(island.devices_per_node for island in islands),
            least_tokens=1 if "context" in self.pinned else self.least_tokens,
            offloads=all(island.device.host_link is not None for island in islands),
            islands=tuple(island.size for island in islands) if len(islands) > 1 else (),
            only=only or {},
            pinned=self.pinned,
        )


_ALIKE = (
    "tensor", "sequence_parallel", "context", "expert", "expert_tensor", "micro_batch", "recompute", "offload", "zero",
)  # fmt: skip
"""The fields by which a recipe cuts a micro-batch, and keeps and shards what it makes."""


def alike(recipe: Recipe) -> Only:
    """The recipes that have these fields as one has."""
    return {name: (getattr(recipe, name),) for name in _ALIKE}


def _best_of(parts: Iterable[FoundRecipe]) -> FoundRecipe | None:
    """The part with the best recipe; None where none has any."""
    return min((part for part in parts if part.recipe), key=lambda part: part.objective, default=None)


def _together(parts: Sequence[FoundRecipe]) -> FoundRecipe:
    """The best of several searches, each of a part of all recipes, one after the other."""
    best = _best_of(reversed(parts)) or parts[-1]
    return replace(
        best,
        lower_bound=min(best.objective, *(part.lower_bound for part in parts)),
        is_complete=all(part.is_complete for part in parts),
        was_interrupted=any(part.was_interrupted for part in parts),
        priced=sum(part.priced for part in parts),
        nodes=sum(part.nodes for part in parts),
        search_time_s=sum(part.search_time_s for part in parts),
    )


def _at_least(watch: Watch, floor: float) -> Watch:
    """Tells how a part of all searches goes, where others have a bound of `floor`."""
    return lambda found: watch(replace(found, lower_bound=min(found.lower_bound, floor)))
