"""The best recipe of a model on a joined cluster: on any of its islands, in any order along the pipeline.

Each choice of islands in an order is a search of its own: of one island alone it is that of `recipe_problem`, of
several that of `islands_objectives`. Each begins with the best recipe of those before it, so that the bounds of all
together prove the best of all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import permutations

from autoshard.ir.recipe import Recipe
from cost_models.joined import JoinedCluster
from cost_models.step import StepModel, fitted
from passes.recipes.islands_objectives import IslandsFastest, IslandsSmallest
from passes.recipes.islands_pricer import IslandsPricer
from passes.recipes.place_islands import chosen_islands
from passes.recipes.price_model import CountedModel
from passes.recipes.recipe_objectives import Fastest, Objective, Smallest
from passes.recipes.recipe_pricer import RecipePricer
from passes.recipes.recipe_space import Only, RecipeSpace
from passes.recipes.search_recipes import FoundRecipe, Watch, search_recipes

_BASELINES_SHARE = 0.5
"""Part of the time budget that the baselines may take, which are a good part of the search."""


_ObjectiveOf = Callable[[tuple[int, ...], RecipeSpace], Objective]
"""What is minimised on a choice of islands, over a space."""


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
    _priced: dict[tuple[int, ...], IslandsPricer] = field(default_factory=dict)

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

    def best(
        self,
        *,
        only: Only | None = None,
        memory_limit: float | None = None,
        routes: Sequence[tuple[int, ...]] | None = None,
        time_budget_s: float = math.inf,
        known: Recipe | None = None,
        watch: Watch | None = None,
    ) -> FoundRecipe:
        """The fastest recipe that fits.

        Args:
            only: searched fields to the values that they may have, `{"pipeline": range(2, 65)}`.
            memory_limit: bytes of each device, in place of the problem's.
            routes: those that are searched; None: all.
            time_budget_s, known, watch: see `search_recipes`.
        """
        limits = self.memory_limits if memory_limit is None else (memory_limit,) * len(self.pricers)
        before = [] if known is None else [_known(known, self.time_s(known))]
        return self._search(self._fastest(limits), only, routes or self.routes, time_budget_s, before, watch)

    def _fastest(self, limits: Sequence[float]) -> _ObjectiveOf:
        """What is minimised on each route, within so many bytes of each island's devices."""

        def fastest(route: tuple[int, ...], space: RecipeSpace) -> Objective:
            if len(route) == 1:
                return Fastest(self.pricers[route[0]], limits[route[0]], space.has_uneven)
            return IslandsFastest(self._pricer(route), [limits[place] for place in route])

        return fastest

    def smallest(self, *, only: Only | None = None, time_budget_s: float = math.inf) -> FoundRecipe:
        """The recipe whose fullest device is the least full, of its limit; its objective is that device's bytes."""

        start, known = time.monotonic(), list[FoundRecipe]()
        for (place,) in (route for route in self.routes if len(route) == 1):
            space = self.space((place,), only)
            least = Smallest(self.pricers[place], space.has_uneven)
            found = search_recipes(space, least, self._fullest_bytes, time_budget_s=time_budget_s)
            limit = self.memory_limits[place]
            known.append(replace(found, objective=found.objective / limit, lower_bound=found.lower_bound / limit))

        def smallest(route: tuple[int, ...], space: RecipeSpace) -> Objective:
            return IslandsSmallest(self._pricer(route), [self.memory_limits[place] for place in route])

        left_s = time_budget_s - (time.monotonic() - start)
        several = [route for route in self.routes if len(route) > 1]
        found = self._search(smallest, only, several, left_s, known)
        if found.recipe is None:
            return found
        size, _ = self.tightest(found.recipe)
        return replace(found, objective=size, lower_bound=size if found.is_complete else 0.0)

    def tightest(self, recipe: Recipe) -> tuple[float, float]:
        """Bytes of the device of a recipe that is the fullest, of its limit, and this limit."""
        places = chosen_islands(recipe, self.cluster)
        needed = map(float, self._pricer(places).memory_bytes(recipe))
        sizes = zip(needed, (self.memory_limits[place] for place in places), strict=True)
        return max(sizes, key=lambda pair: pair[0] / pair[1])

    def _search(
        self,
        objective: _ObjectiveOf,
        only: Only | None,
        routes: Sequence[tuple[int, ...]],
        time_budget_s: float,
        parts: Sequence[FoundRecipe] = (),
        watch: Watch | None = None,
    ) -> FoundRecipe:
        """The best of some routes and of `parts`, found before; each search begins with the best of those before it."""
        start, parts = time.monotonic(), list(parts)
        best = min((part for part in parts if part.recipe), key=_objective, default=None)
        for number, route in enumerate(routes):
            left_s = time_budget_s - (time.monotonic() - start)
            space = self.space(route, only)
            found = search_recipes(
                space, objective(route, space), self._fullest_bytes, time_budget_s=left_s, watch=watch,
                known=best and best.recipe, known_objective=best and best.objective,
            )  # fmt: skip
            parts.append(found)
            best = found if found.recipe else best
            if found.was_interrupted:
                parts += [_NOTHING] * (number + 1 < len(routes))
                break
        return replace(
            best or parts[-1],
            lower_bound=min(part.lower_bound for part in parts),
            is_complete=all(part.is_complete for part in parts),
            was_interrupted=any(part.was_interrupted for part in parts),
            priced=sum(part.priced for part in parts),
            nodes=sum(part.nodes for part in parts),
            search_time_s=time.monotonic() - start,
        )

    def time_s(self, recipe: Recipe) -> float:
        """The step of a recipe."""
        return self._pricer(chosen_islands(recipe, self.cluster)).time_s(recipe)

    def limit_of(self, recipe: Recipe) -> float:
        """The limit of the devices among which a recipe's fullest rank is."""
        places = chosen_islands(recipe, self.cluster)
        needed = self._pricer(places).memory_bytes(recipe)
        return self.memory_limits[places[needed.index(max(needed))]]

    def _fullest_bytes(self, recipe: Recipe) -> int:
        return max(self._pricer(chosen_islands(recipe, self.cluster)).memory_bytes(recipe))

    def _pricer(self, route: tuple[int, ...]) -> IslandsPricer:
        if route not in self._priced:
            own = [self.pricers[place] for place in route]
            self._priced[route] = IslandsPricer(self.counted, self.cluster, own, self.model)
        return self._priced[route]

    def baselines(self, time_budget_s: float = math.inf) -> dict[str, FoundRecipe]:
        """The fastest recipe of each island alone."""
        islands, single = self.cluster.islands, [route for route in self.routes if len(route) == 1]
        alone = {f"island {route[0]} ({islands[route[0]].name}) alone": route for route in single}
        share_s = time_budget_s / max(1, len(alone))
        return {name: self.best(routes=[route], time_budget_s=share_s) for name, route in alone.items()}

    def best_of_all(
        self, *, time_budget_s: float = math.inf, watch: Watch | None = None
    ) -> tuple[FoundRecipe, dict[str, FoundRecipe]]:
        """The fastest recipe, and the baselines, the fastest of which is its first incumbent; times are of both."""
        start = time.monotonic()
        kinds = self.baselines(_BASELINES_SHARE * time_budget_s)
        parts = list(kinds.values())
        several = [route for route in self.routes if len(route) > 1]
        if any(part.was_interrupted for part in parts):
            parts, several = [*parts, *[_NOTHING] * len(several[:1])], []
        left_s = time_budget_s - (time.monotonic() - start)
        found = self._search(self._fastest(self.memory_limits), None, several, left_s, parts, watch)
        return replace(found, search_time_s=time.monotonic() - start), kinds

    def space(self, route: tuple[int, ...], only: Only | None = None) -> RecipeSpace:
        """The recipes on some islands that are searched, some fields restricted."""
        islands = [self.cluster.islands[place] for place in route]
        return RecipeSpace(
            self.counted,
            sum(island.size for island in islands),
            replace(self.base, islands=route),
            most_tensor=None if "tensor" in self.pinned else min(island.devices_per_node for island in islands),
            least_tokens=1 if "context" in self.pinned else self.least_tokens,
            islands=tuple(island.size for island in islands) if len(islands) > 1 else (),
            only=only or {},
            pinned=self.pinned,
        )


def _objective(found: FoundRecipe) -> float:
    return found.objective


def _known(recipe: Recipe, objective: float) -> FoundRecipe:
    """A recipe of which nothing else is known than what it takes."""
    return FoundRecipe(recipe, objective, objective, True, False, 0, 0, 0.0)


_NOTHING = FoundRecipe(None, math.inf, 0.0, False, False, 0, 0, 0.0)
"""What is found where nothing was searched."""
