"""Quantities that a search over recipes minimises, with bounds for sets of them: the time of a step, or memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress

import numpy as np

from autoshard.ir.execution import Execution
from passes.recipe_search.known_pipes import Pipe, PipeSet
from passes.recipe_search.recipe_pricer import RecipePricer
from passes.recipe_search.recipe_space import Keeping

Bound = Callable[[], float]
"""A bound that is found when it is asked for."""


@dataclass(frozen=True, slots=True)
class Fastest:
    """The time of a step, seconds, for recipes that fit in `memory_limit` bytes.

    Sets of recipes that have more and more of `recipe` have bounds; infinite ones if none of the recipes will do.
    """

    pricer: RecipePricer
    memory_limit: float

    def is_too_large(self, recipe: Execution) -> bool:
        """Whether no recipe of a layout will do, nor of one with larger micro-batches."""
        return self.pricer.workspace_bytes(recipe) > self.memory_limit

    def more_only_adds(self, keeping: Keeping) -> bool:
        """Whether to compute more again than a keeping does, or to copy what it keeps, only adds to the objective.

        Of what is copied, what is computed again need not be.
        """
        return keeping.offload == "none"

    def layouts(self, first: Execution, most: int, keepings: Sequence[Keeping], *, zero: int) -> Sequence[Bound]:
        """Bounds of a layout with one keeping or another, from the first recipe's pipeline ranks to `most`.

        `zero`: the ZeRO stage that shards most of those that they may have.
        """
        needed = self.pricer.layout_memory_floors(first, most, keepings, zero=zero)
        fits = (needed <= self.memory_limit).tolist()
        return [partial(self._layout, first, most, *each) for each in zip(keepings, fits, strict=True)]

    def _layout(self, first: Execution, most: int, keeping: Keeping, fits: bool) -> float:
        kind = replace(first, recompute=keeping.recompute, offload=keeping.offload)
        return self.pricer.layout_floor(kind, most) if fits else math.inf

    def pipelines(self, recipes: Sequence[Execution], pipes: PipeSet) -> Sequence[float]:
        """Bounds of recipes that differ in sharding, with any of some pipelines."""
        bounds = np.full(len(recipes), math.inf)
        fits = self.pricer.memory_floors(recipes, pipes) <= self.memory_limit
        some = np.asarray(fits.any(axis=1))
        if some.any():
            bounds[some] = self.pricer.mean_floors(list(compress(recipes, some)))
        return bounds.tolist()

    def schedules(self, recipe: Execution, shardings: Iterable[Execution], pipes: PipeSet) -> Sequence[float]:
        """Bounds of recipes with each of some pipelines, all of the recipe's size.

        `recipe` shards most; `shardings` are its like with each sharding that they may have.
        """
        fits = self.pricer.memory_floors([recipe], pipes)[0] <= self.memory_limit
        bounds = np.full(len(pipes), math.inf)
        if fits.any():
            bounds[fits] = self.pricer.path_floors(list(shardings), pipes, fits)
        return bounds.tolist()

    def recipes(self, recipes: Sequence[Execution], pipe: Pipe, *, enough: float) -> Sequence[float]:
        """A bound of each recipe; they differ in sharding, and their pipeline is `pipe`.

        What surely has more than `enough` need not be infinite.
        """
        floors = self.pricer.recipe_floors(recipes, pipe).tolist()
        return [
            floor if floor > enough or self.pricer.fits(recipe, self.memory_limit) else math.inf
            for floor, recipe in zip(floors, recipes, strict=True)
        ]

    def price(self, recipe: Execution) -> float:
        """The recipe's objective."""
        return self.pricer.time_s(recipe)


@dataclass(frozen=True, slots=True)
class Smallest:
    """The memory of a recipe's fullest rank, bytes."""

    pricer: RecipePricer

    def is_too_large(self, recipe: Execution) -> bool:
        """False: every layout has a least memory."""
        return False

    def more_only_adds(self, keeping: Keeping) -> bool:
        """False: recomputation and offload save memory."""
        return False

    def layouts(self, first: Execution, most: int, keepings: Sequence[Keeping], *, zero: int) -> Sequence[Bound]:
        """Bounds of a layout, as `Fastest.layouts` has them."""
        floors = self.pricer.layout_memory_floors(first, most, keepings, zero=zero)
        return [partial(float, floor) for floor in floors]

    def pipelines(self, recipes: Sequence[Execution], pipes: PipeSet) -> Sequence[float]:
        """Bounds of recipes with any of some pipelines, as `Fastest.pipelines` has them."""
        floors = self.pricer.memory_floors(recipes, pipes)
        return floors.min(axis=1, initial=math.inf).tolist()

    def schedules(self, recipe: Execution, shardings: Iterable[Execution], pipes: PipeSet) -> Sequence[float]:
        """Bounds of a recipe with each of some pipelines, as `Fastest.schedules` has them."""
        return self.pricer.memory_floors([recipe], pipes)[0].tolist()

    def recipes(self, recipes: Sequence[Execution], pipe: Pipe, *, enough: float) -> Sequence[float]:
        """The memory of each recipe; infinite where its host has too little."""
        return [self.price(recipe) if self.pricer.fits(recipe, math.inf) else math.inf for recipe in recipes]

    def price(self, recipe: Execution) -> float:
        """The recipe's memory."""
        return float(self.pricer.memory_bytes(recipe))


Objective = Fastest | Smallest
"""A quantity that a search minimises."""
