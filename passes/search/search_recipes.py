"""Find the fastest recipe of a set by best-first branch and bound, with a lower bound of all its recipes.

An entry of the queue is a set of recipes with a lower bound of their objective (`recipe_pricer`). There are three
kinds of entries, and each is split into entries of the next kind:

1. All recipes with one layout and one activation policy. If a layout's fastest policy may fit in memory, only its entry
   is made at first. The slower policies, which recompute more, get their entries when this entry is split.
2. All recipes that also have the same number of pipeline ranks and the same sharding.
3. A single recipe. It is priced (`passes.search.price_recipe`) if it fits in memory.

The search ends when no entry can be faster than the best recipe. The best recipe is then the fastest of all recipes.
Among equally fast recipes, the best recipe needs the least memory. The time limit (`Ceiling`) or Ctrl-C may stop the
search. The result is then the best recipe so far, with the lowest bound of the remaining entries.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import compress
from typing import NamedTuple

from autoshard.ir.execution import Execution
from passes.search.recipe_pricer import RecipePricer
from passes.search.recipe_space import ActivationPolicy, Layout, Pipe, RecipeSpace, Sharding
from passes.solver.one_thread import one_blas_thread
from passes.solver.search_control import Ceiling


@dataclass(frozen=True, slots=True)
class FoundRecipe:
    """The result of a search.

    Args:
        recipe: the best recipe that was priced, or None. In a complete search None means that no recipe fits.
        objective: seconds of a step under the recipe, or bytes of its peak memory if memory is minimised; infinite
            without a recipe.
        lower_bound: a lower bound of the objectives of all recipes of the searched set.
        is_complete: whether the search came to its end, so that no recipe is better.
        was_interrupted: whether Ctrl-C ended the search.
        priced, nodes: the number of priced recipes, and the number of sets of recipes that the search made.
        search_time_s: seconds of wall time.
    """

    recipe: Execution | None
    objective: float
    lower_bound: float
    is_complete: bool
    was_interrupted: bool
    priced: int
    nodes: int
    search_time_s: float

    @property
    def was_cut(self) -> bool:
        """Whether a time limit, and not Ctrl-C, ended the search early."""
        return not (self.is_complete or self.was_interrupted)


NOTHING = FoundRecipe(
    None, math.inf, 0.0, is_complete=False, was_interrupted=False, priced=0, nodes=0, search_time_s=0.0
)
"""The result of a search that has not begun."""

Watch = Callable[[FoundRecipe], None]
"""A function that a search calls with its result so far: after each new best recipe, and now and then in between."""

_FIRST_SPLITS = 4
"""Number of entries to split or price after the entries of each layout, to find a first recipe early."""

_ENTRIES_BETWEEN_WATCHES = 256


@one_blas_thread()
def search_recipes(
    space: RecipeSpace,
    pricer: RecipePricer,
    memory_limit: float,
    *,
    smallest: bool = False,
    ceiling: Ceiling | None = None,
    known: Execution | None = None,
    watch: Watch | None = None,
) -> FoundRecipe:
    """Return the fastest recipe of a set that fits in the memory limit.

    Args:
        memory_limit: bytes of a device that a recipe may take.
        smallest: whether to minimise the peak memory in bytes instead of the step's time in seconds.
        ceiling: the time at which the search ends at the latest; None: no limit.
        known: a recipe that fits, priced before all others. Recipes that cannot be better are skipped.
        watch: is called with the result so far.

    Raises:
        KeyboardInterrupt: Ctrl-C before any recipe was priced. Later, Ctrl-C only ends the search.
    """
    search = _BestFirst(space, pricer, memory_limit, ceiling or Ceiling(), watch, smallest)
    was_interrupted = False
    try:
        is_complete = search.run(known)
    except KeyboardInterrupt:
        if search.best is None:
            raise
        is_complete, was_interrupted = False, True
    return search.found(is_complete=is_complete, was_interrupted=was_interrupted)


class _LayoutSet(NamedTuple):
    """All recipes with one layout and one activation policy.

    `others` are policies that take longer. Their sets are put on the heap when this set is split.
    """

    layout: Layout
    policy: ActivationPolicy
    others: tuple[ActivationPolicy, ...]


class _ShardedSet(NamedTuple):
    layout: Layout
    policy: ActivationPolicy
    ranks: int
    sharding: Sharding


_Node = _LayoutSet | _ShardedSet | Execution


@dataclass
class _BestFirst:
    """One best-first search for a recipe, with its results so far.

    Args:
        open: a heap of entries (lower bound, number of the entry, set of recipes).
        best: the best recipe so far, with its `objective` and peak `memory` in bytes.
        bound: a lower bound of all recipes: 0 at first, later the lowest bound of the heap.
        next_watch: the number of entries at which `watch` is called next.
    """

    space: RecipeSpace
    pricer: RecipePricer
    memory_limit: float
    ceiling: Ceiling
    watch: Watch | None
    smallest: bool
    start: float = field(default_factory=time.monotonic)
    open: list[tuple[float, int, _Node]] = field(default_factory=list)
    best: Execution | None = None
    objective: float = math.inf
    memory: int = 0
    bound: float = 0.0
    priced: int = 0
    nodes: int = 0
    next_watch: int = 0

    def run(self, known: Execution | None) -> bool:
        """Search, and return whether the best recipe of all is found before the time limit.

        `known` is a recipe to begin with, or None.
        """
        if known is not None:
            self._price(known)
        for layouts in self.space.layouts():
            if self._is_over():
                return False
            self._open_layouts(layouts)
            for _ in range(_FIRST_SPLITS):
                self._take_first()
        while self.open and self.open[0][0] < self.objective:
            if self._is_over():
                return False
            self.bound = self.open[0][0]
            self._take_first()
        self.bound = self.objective
        return True

    def found(self, *, is_complete: bool, was_interrupted: bool = False) -> FoundRecipe:
        bound, elapsed_s = min(self.bound, self.objective), time.monotonic() - self.start
        ended = (is_complete, was_interrupted, self.priced, self.nodes, elapsed_s)
        return FoundRecipe(self.best, self.objective, bound, *ended)

    def _is_over(self) -> bool:
        if self.watch is not None and self.nodes >= self.next_watch:
            self.next_watch = self.nodes + _ENTRIES_BETWEEN_WATCHES
            self.watch(self.found(is_complete=False))
        return self.ceiling.cuts()

    def _take_first(self) -> None:
        """Price or split the entry with the lowest bound, unless it cannot be better than the best recipe."""
        if not self.open or self.open[0][0] >= self.objective:
            return
        bound, _, node = heapq.heappop(self.open)
        if isinstance(node, _LayoutSet):
            self._split_layout(bound, node)
        elif isinstance(node, _ShardedSet):
            self._split_sharded(node)
        elif self.pricer.fits(node, self.memory_limit):
            self._price(node)

    def _open_layouts(self, layouts: tuple[Layout, ...]) -> None:
        """Put layouts that differ only in the micro-batch on the heap, the smallest micro-batch first.

        The first layout whose workspace exceeds the memory limit ends the loop.
        """
        for layout in layouts:
            first = self._recipe(layout, ActivationPolicy(), next(self.space.pipelines(layout)), Sharding())
            if self.pricer.workspace_bytes(first) > self.memory_limit:
                return
            for place, policy in enumerate(policies := self.space.policies(layout)):
                others = () if place or self.smallest else tuple(policies[1:])
                if self._open(layout, policy, others) and others:
                    break

    def _open(self, layout: Layout, policy: ActivationPolicy, others: tuple[ActivationPolicy, ...] = ()) -> bool:
        """Put all recipes with a layout and a policy on the heap, and return True.

        If even the least memory of these recipes exceeds the limit, nothing is put on the heap, and False is returned.
        """
        sizes, zero = list(self.space.pipelines(layout)), self.space.most_zero
        needed = self.pricer.least_memory(self._recipe(layout, policy, sizes[-1], Sharding(zero)))
        if needed > self.memory_limit:
            return False
        ends = (self._recipe(layout, policy, ranks, Sharding(min(1, zero))) for ranks in (sizes[0], sizes[-1]))
        bound = needed if self.smallest else min(map(self.pricer.least_time, ends))
        self._push(bound, _LayoutSet(layout, policy, others))
        return True

    def _split_layout(self, bound: float, node: _LayoutSet) -> None:
        """Split the set `node`, whose lower bound is `bound`, and put its parts on the heap.

        There is one part for each policy in `node.others`. The policy of the set itself has one part for each number of
        pipeline ranks and each sharding.
        """
        for policy in node.others:
            self._open(node.layout, policy)
        for ranks in self.space.pipelines(node.layout):
            for sharding in self.space.shardings(node.layout, ranks):
                recipe = self._recipe(node.layout, node.policy, ranks, sharding)
                if self.space.admits(recipe):
                    least = bound if self.smallest else self.pricer.least_time(recipe)
                    self._push(least, _ShardedSet(node.layout, node.policy, ranks, sharding))

    def _split_sharded(self, node: _ShardedSet) -> None:
        pipes = self.space.pipes(node.layout, node.ranks)
        if not pipes:
            return
        recipe = self.space.recipe(node.layout, node.policy, pipes[0], node.sharding)
        bounds = self.pricer.memory_floors(recipe, pipes)
        fits = bounds <= self.memory_limit
        pipes, bounds = tuple(compress(pipes, fits)), bounds[fits]
        if pipes and not self.smallest:
            bounds = self.pricer.least_times(recipe, pipes)
        for least, pipe in zip(bounds.tolist(), pipes, strict=True):
            self._push(least, self.space.recipe(node.layout, node.policy, pipe, node.sharding))

    def _recipe(self, layout: Layout, policy: ActivationPolicy, ranks: int, sharding: Sharding) -> Execution:
        """Return a recipe with these choices, for bounds that do not depend on the schedule.

        The schedule is 1F1B if there are several pipeline ranks.
        """
        pipe = Pipe(ranks, "1F1B") if ranks > 1 else Pipe()
        return self.space.recipe(layout, policy, pipe, sharding)

    def _push(self, bound: float, node: _Node) -> None:
        self.nodes += 1
        if bound < self.objective:
            heapq.heappush(self.open, (bound, self.nodes, node))

    def _price(self, recipe: Execution) -> None:
        memory = self.pricer.memory_bytes(recipe)
        objective = float(memory) if self.smallest else self.pricer.time_s(recipe)
        self.priced += 1
        if (objective, memory) < (self.objective, self.memory):
            self.objective, self.memory, self.best = objective, memory, recipe
            if self.watch is not None:
                self.watch(self.found(is_complete=False))
