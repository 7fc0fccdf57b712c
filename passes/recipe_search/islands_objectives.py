"""What is minimised on several islands of a joined cluster: the time of a step, or how full the fullest device is.

Pipelines over islands are a set of each share of the blocks (`known_pipes.island_shares`), never an open one: bounds
are those of `bound_islands`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from autoshard.ir.recipe import Recipe
from passes.recipe_search.bound_boundaries import Boundaries
from passes.recipe_search.islands_pricer import IslandsPricer
from passes.recipe_search.known_pipes import Pipe, PipeSet, Share, island_shares
from passes.recipe_search.recipe_objectives import Bound, PipesOf
from passes.recipe_search.recipe_pricer import Kind
from passes.recipe_search.recipe_space import Keeping


@dataclass(frozen=True, slots=True)
class IslandsFastest:
    """The time of a step on several islands, seconds, for recipes that fit: bytes of a device of each, `limits`."""

    pricer: IslandsPricer
    limits: Sequence[float]

    def is_too_large(self, recipe: Recipe) -> bool:
        """See `recipe_objectives.Objective`."""
        return self.pricer.workspace_bytes(recipe) > max(self.limits)

    def more_only_adds(self, keeping: Keeping) -> bool:
        """See `recipe_objectives.Objective`."""
        return keeping.offload == "none"

    def layouts(self, first: Recipe, most: int, keepings: Sequence[Keeping], *, zero: int) -> Sequence[Bound]:
        """See `recipe_objectives.Objective`."""
        return [partial(self._layout, first, most, keeping, zero) for keeping in keepings]

    def _layout(self, first: Recipe, most: int, keeping: Keeping, zero: int) -> float:
        kind = replace(first, recompute=keeping.recompute, offload=keeping.offload)
        shares = _shares(self.pricer, kind)
        fits = (self.pricer.layout_memory(kind, most, shares, zero=zero) <= np.array(self.limits)).all(axis=1)
        return self.pricer.layout_floor(kind, most, shares) if fits.any() else math.inf

    def ranks(self, recipe: Recipe, shares: Sequence[Share]) -> Sequence[float]:
        """See `recipe_objectives.Objective`."""
        return self.pricer.ranks_floors(recipe, tuple(shares)).tolist()

    def pipelines(self, kinds: Sequence[Kind], shares: Sequence[Share], pipes_of: PipesOf) -> Sequence[Sequence[float]]:
        """See `recipe_objectives.Objective`."""
        assert all(len(groups) <= 1 for _, groups in kinds), "ways to exchange shards are apart"
        return [self._pipeline(recipe, tuple(shares)) for recipe, _ in kinds]

    def _pipeline(self, recipe: Recipe, known: tuple[Share, ...]) -> Sequence[float]:
        fits = self.pricer.share_fullness(recipe, known, self.limits) <= 1.0
        if not fits.any():
            return [math.inf] * len(known)
        return np.where(fits, self.pricer.share_floors(recipe, known), math.inf).tolist()

    def schedules(self, recipe: Recipe, shardings: Iterable[Recipe], pipes: PipeSet) -> Sequence[float]:
        """See `recipe_objectives.Objective`."""
        fits = self.pricer.fullness(recipe, pipes, self.limits) <= 1.0
        bounds = np.full(len(pipes), math.inf)
        if fits.any():
            fitting = [pipe for pipe, fit in zip(pipes, fits, strict=True) if fit]
            bounds[fits] = self.pricer.path_floors(list(shardings), fitting)
        return bounds.tolist()

    def uneven(self, recipe: Recipe, pipes: PipeSet) -> Sequence[float]:
        """See `recipe_objectives.Objective`."""
        assert not pipes, "pipelines over islands are not open"
        return []

    def boundaries(self, recipe: Recipe, shardings: Sequence[Recipe], pipe: Pipe, *, enough: float) -> Boundaries:
        """See `recipe_objectives.Objective`."""
        raise AssertionError("pipelines over islands are not open")

    def recipes(self, recipes: Sequence[Recipe], pipe: Pipe, *, enough: float) -> Sequence[float]:
        """See `recipe_objectives.Objective`."""
        return [self._recipe(recipe, pipe) for recipe in recipes]

    def _recipe(self, recipe: Recipe, pipe: Pipe) -> float:
        fits = self.pricer.fits(recipe, self.limits)
        return float(self.pricer.path_floors([recipe], [pipe])[0]) if fits else math.inf

    def price(self, recipe: Recipe) -> float:
        """See `recipe_objectives.Objective`."""
        return self.pricer.time_s(recipe)


@dataclass(frozen=True, slots=True)
class IslandsSmallest:
    """How full the fullest device of several islands is, of its limit."""

    pricer: IslandsPricer
    limits: Sequence[float]

    def is_too_large(self, recipe: Recipe) -> bool:
        """See `recipe_objectives.Objective`."""
        return False

    def more_only_adds(self, keeping: Keeping) -> bool:
        """See `recipe_objectives.Objective`."""
        return False

    def layouts(self, first: Recipe, most: int, keepings: Sequence[Keeping], *, zero: int) -> Sequence[Bound]:
        """See `recipe_objectives.Objective`."""
        return [partial(self._layout, first, most, keeping, zero) for keeping in keepings]

    def _layout(self, first: Recipe, most: int, keeping: Keeping, zero: int) -> float:
        kind = replace(first, recompute=keeping.recompute, offload=keeping.offload)
        shares = _shares(self.pricer, kind)
        return float((self.pricer.layout_memory(kind, most, shares, zero=zero) / self.limits).max(axis=1).min())

    def ranks(self, recipe: Recipe, shares: Sequence[Share]) -> Sequence[float]:
        """See `recipe_objectives.Objective`."""
        return [0.0] * len(shares)

    def pipelines(self, kinds: Sequence[Kind], shares: Sequence[Share], pipes_of: PipesOf) -> Sequence[Sequence[float]]:
        """See `recipe_objectives.Objective`."""
        return [self.pricer.share_fullness(recipe, tuple(shares), self.limits).tolist() for recipe, _ in kinds]

    def schedules(self, recipe: Recipe, shardings: Iterable[Recipe], pipes: PipeSet) -> Sequence[float]:
        """See `recipe_objectives.Objective`."""
        return self.pricer.fullness(recipe, pipes, self.limits).tolist()

    def uneven(self, recipe: Recipe, pipes: PipeSet) -> Sequence[float]:
        """See `recipe_objectives.Objective`."""
        assert not pipes, "pipelines over islands are not open"
        return []

    def boundaries(self, recipe: Recipe, shardings: Sequence[Recipe], pipe: Pipe, *, enough: float) -> Boundaries:
        """See `recipe_objectives.Objective`."""
        raise AssertionError("pipelines over islands are not open")

    def recipes(self, recipes: Sequence[Recipe], pipe: Pipe, *, enough: float) -> Sequence[float]:
        """See `recipe_objectives.Objective`."""
        limits = [math.inf] * len(self.limits)
        return [self.price(recipe) if self.pricer.fits(recipe, limits) else math.inf for recipe in recipes]

    def price(self, recipe: Recipe) -> float:
        """See `recipe_objectives.Objective`."""
        needed = self.pricer.memory_bytes(recipe)
        return max(size / limit for size, limit in zip(needed, self.limits, strict=True))


def _shares(pricer: IslandsPricer, first: Recipe) -> tuple[Share, ...]:
    """All shares of the blocks with a recipe's pipeline ranks, or more."""
    ranks = tuple(island.ranks for island in pricer.placement(first).islands)
    return island_shares(len(pricer.counted.blocks), ranks)
