"""What a search over recipes minimises, with bounds for sets of them: the time of a step, or memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from typing import Protocol

import numpy as np

from autoshard.ir.recipe import Recipe
from passes.recipe_search.bound_boundaries import Boundaries
from passes.recipe_search.recipe_pricer import RecipePricer
from passes.recipe_search.recipe_space import Keeping, Pipe, Share

Bound = Callable[[], float]
"""A bound that is found when it is asked for."""


class Objective(Protocol):
    """What is minimised: bounds for sets of recipes that have more and more of `recipe`, infinite if none will do."""

    def is_too_large(self, recipe: Recipe) -> bool:
        """Whether no recipe of a layout will do, nor of one with larger micro-batches."""
        ...

    def more_only_adds(self, keeping: Keeping) -> bool:
        """Whether to compute more again than a keeping does, or to copy what it keeps, only adds to the objective."""
        ...

    def layouts(self, first: Recipe, most: int, keepings: Sequence[Keeping]) -> Sequence[Bound]:
        """Those of a layout with one keeping or another, from the first recipe's pipeline ranks to `most`."""
        ...

    def ranks(self, recipe: Recipe, shares: Sequence[Share]) -> Sequence[float]:
        """Those of its pipeline ranks, whatever each micro-batch exchanges, by the islands' blocks.

        The recipe exchanges nothing.
        """
        ...

    def pipelines(self, recipes: Sequence[Recipe], shares: Sequence[Share]) -> Sequence[Sequence[float]]:
        """Those of some pipeline ranks that also exchange shards as one of the recipes or another, or do not.

        Each by the islands' blocks.
        """
        ...

    def schedules(self, recipe: Recipe, shardings: Iterable[Recipe], pipes: Sequence[Pipe]) -> Sequence[float]:
        """Those that also have one pipeline or another, each of the recipe's size, none of them open.

        `recipe` shards most; `shardings` are its like with each sharding that they may have.
        """
        ...

    def uneven(self, recipe: Recipe, pipe: Pipe) -> float:
        """Those that also have a pipeline of an open one; the recipe is one of those that shard most."""
        ...

    def boundaries(self, recipe: Recipe, pipe: Pipe, *, has_ends: bool, enough: float) -> Boundaries:
        """Of the recipe with each pipeline of an open one; without its ends, of all that gather as it does.

        Without, the recipe is the one that shards most. Bounds of what surely has more than `enough` may be loose.
        """
        ...

    def recipe(self, recipe: Recipe, pipe: Pipe) -> float:
        """Of the recipe, whose pipeline is `pipe`."""
        ...

    def price(self, recipe: Recipe) -> float:
        """The recipe's objective."""
        ...


@dataclass(frozen=True, slots=True)
class Fastest:
    """The time of a step, seconds, for recipes that fit in `memory_limit` bytes.

    `has_uneven`: whether blocks may be shared out in any way.
    """

    pricer: RecipePricer
    memory_limit: float
    has_uneven: bool

    def is_too_large(self, recipe: Recipe) -> bool:
        """See `Objective`."""
        return self.pricer.workspace_bytes(recipe) > self.memory_limit

    def more_only_adds(self, keeping: Keeping) -> bool:
        """See `Objective`. Of what is copied, what is computed again need not be."""
        return keeping.offload == "none"

    def layouts(self, first: Recipe, most: int, keepings: Sequence[Keeping]) -> Sequence[Bound]:
        """See `Objective`."""
        needed = self.pricer.layout_memory_floors(first, most, keepings, uneven=self.has_uneven)
        fits = (needed <= self.memory_limit).tolist()
        return [partial(self._layout, first, most, *each) for each in zip(keepings, fits, strict=True)]

    def _layout(self, first: Recipe, most: int, keeping: Keeping, fits: bool) -> float:
        kind = replace(first, recompute=keeping.recompute, offload=keeping.offload)
        return self.pricer.layout_floor(kind, most) if fits else math.inf

    def ranks(self, recipe: Recipe, shares: Sequence[Share]) -> Sequence[float]:
        """See `Objective`."""
        return [self.pricer.ranks_floor(recipe)]

    def pipelines(self, recipes: Sequence[Recipe], shares: Sequence[Share]) -> Sequence[Sequence[float]]:
        """See `Objective`."""
        fits = self.pricer.pipeline_memory_floors(recipes, uneven=self.has_uneven) <= self.memory_limit
        bounds = np.full(len(recipes), math.inf)
        if fits.any():
            bounds[fits] = self.pricer.mean_floors(list(compress(recipes, fits)))
        return bounds[:, None].tolist()

    def schedules(self, recipe: Recipe, shardings: Iterable[Recipe], pipes: Sequence[Pipe]) -> Sequence[float]:
        """See `Objective`."""
        fits = self.pricer.memory_floors(recipe, pipes) <= self.memory_limit
        bounds = np.full(len(pipes), math.inf)
        if fits.any():
            bounds[fits] = self.pricer.path_floors(list(shardings), pipes, fits)
        return bounds.tolist()

    def uneven(self, recipe: Recipe, pipe: Pipe) -> float:
        """See `Objective`."""
        if self.pricer.uneven_memory_floor(recipe, pipe) > self.memory_limit:
            return math.inf
        return self.pricer.uneven_floor(recipe, pipe)

    def boundaries(self, recipe: Recipe, pipe: Pipe, *, has_ends: bool, enough: float) -> Boundaries:
        """See `Objective`."""
        return self.pricer.fastest_boundaries(recipe, pipe, self.memory_limit, has_ends=has_ends, enough=enough)

    def recipe(self, recipe: Recipe, pipe: Pipe) -> float:
        """See `Objective`."""
        fits = self.pricer.fits(recipe, self.memory_limit)
        return float(self.pricer.path_floors([recipe], [pipe])[0]) if fits else math.inf

    def price(self, recipe: Recipe) -> float:
        """See `Objective`."""
        return self.pricer.time_s(recipe)


@dataclass(frozen=True, slots=True)
class Smallest:
    """The memory of a recipe's fullest rank, bytes; `has_uneven` as in `Fastest`."""

    pricer: RecipePricer
    has_uneven: bool

    def is_too_large(self, recipe: Recipe) -> bool:
        """See `Objective`."""
        return False

    def more_only_adds(self, keeping: Keeping) -> bool:
        """See `Objective`."""
        return False

    def layouts(self, first: Recipe, most: int, keepings: Sequence[Keeping]) -> Sequence[Bound]:
        """See `Objective`."""
        floors = self.pricer.layout_memory_floors(first, most, keepings, uneven=self.has_uneven)
        return [partial(float, floor) for floor in floors]

    def ranks(self, recipe: Recipe, shares: Sequence[Share]) -> Sequence[float]:
        """See `Objective`."""
        return [0.0]

    def pipelines(self, recipes: Sequence[Recipe], shares: Sequence[Share]) -> Sequence[Sequence[float]]:
        """See `Objective`."""
        return self.pricer.pipeline_memory_floors(recipes, uneven=self.has_uneven)[:, None].tolist()

    def schedules(self, recipe: Recipe, shardings: Iterable[Recipe], pipes: Sequence[Pipe]) -> Sequence[float]:
        """See `Objective`."""
        return self.pricer.memory_floors(recipe, pipes).tolist()

    def uneven(self, recipe: Recipe, pipe: Pipe) -> float:
        """See `Objective`."""
        return self.pricer.uneven_memory_floor(recipe, pipe)

    def boundaries(self, recipe: Recipe, pipe: Pipe, *, has_ends: bool, enough: float) -> Boundaries:
        """See `Objective`."""
        return self.pricer.smallest_boundaries(recipe, pipe)

    def recipe(self, recipe: Recipe, pipe: Pipe) -> float:
        """See `Objective`."""
        return self.price(recipe) if self.pricer.fits(recipe, math.inf) else math.inf

    def price(self, recipe: Recipe) -> float:
        """See `Objective`."""
        return float(self.pricer.memory_bytes(recipe))
