"""Find the best recipe of a space: branch and bound, best first, with a proof or a gap.

The space (`recipe_space`) is a tree. A node is a set of recipes, with a bound below the objective of them all;
for the time of a step under a memory limit (`recipe_objectives.Fastest`; bounds in `bound_recipes`) these are

1. a layout and what is recomputed or offloaded: the mean of ranks, or a micro-batch's latency, without sharding or
   ends; left out unpriced where ranks exceed the memory limit in the mean (`passes.recipe_search.bound_memory`);
2. with the pipeline's ranks, and whether micro-batches exchange shards (ZeRO-2 or -3, and over which group): the mean
   again, with that; left out where the stages of every schedule exceed the limit with that sharding;
3. with the schedule: the longest path of a rank, with its ends under the sharding that has the shortest; left out where
   those and the micro-batches that it holds do;
4. with the sharding, one recipe: the same with its own ends; left out if its memory, or its host's, exceeds the limit.
   Memory is known before times are: the micro-batches that a schedule holds do not depend on them;
5. priced (`passes.recipes.price_recipe`).

The node with the lowest bound is split next, and in turn the deepest one, for a recipe to show soon. Once a priced
recipe has the lowest bound it is the best. Of equal ones it is the one with the least memory, then the first in a fixed
order, so the answer does not depend on the machine. Layouts are taken by rising micro-batch, until one is left out for
its size, which rises with it. What is recomputed only adds to the step, and so does what is offloaded: where a layout
is too slow without, it is left. (What is both may be faster than what is offloaded alone: less is copied.)

`Smallest` looks for the least memory in the same way. Stopped early, by its ceiling or Ctrl-C, the search gives the
best recipe that it priced, and the lowest bound of what is left.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from autoshard.ir.execution import Execution
from autoshard.ir.recipe import RECOMPUTE
from cost_models.schedule_orders import usual_schedule
from passes.recipe_search.known_pipes import Pipe
from passes.recipe_search.recipe_objectives import Objective
from passes.recipe_search.recipe_space import KEEPINGS, Keeping, Layout, RecipeSpace, Sharding
from passes.solver.one_thread import one_blas_thread
from passes.solver.search_control import Ceiling


@dataclass(frozen=True, slots=True)
class FoundRecipe:
    """What a search found.

    Args:
        recipe: the best recipe that was priced, None if none was (none fits, if the search is complete).
        objective: its objective; infinite without.
        lower_bound: no recipe of the space has a lower objective.
        is_complete: whether the search came to its end: the recipe is the best.
        was_interrupted: whether Ctrl-C ended it.
        priced, nodes: recipes that were priced, and sets of recipes that were bounded.
        search_time_s: wall time.
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
        """Whether a ceiling ended it."""
        return not (self.is_complete or self.was_interrupted)


Watch = Callable[[FoundRecipe], None]
"""Called with what is found so far, after every priced recipe and now and then."""


@one_blas_thread()
def search_recipes(
    space: RecipeSpace,
    objective: Objective,
    *,
    ceiling: Ceiling | None = None,
    known: Execution | None = None,
    watch: Watch | None = None,
) -> FoundRecipe:
    """The best recipe of a space.

    Args:
        space: the recipes.
        objective: the quantity that is minimised.
        ceiling: may end it; None: nothing does.
        known: a recipe that will do: nothing worse is looked at.
        watch: told how it goes.

    Raises:
        KeyboardInterrupt: by Ctrl-C, if no recipe was priced yet; else it ends the search.
    """
    search = _BestFirst(space, objective, ceiling or Ceiling(), watch)
    was_interrupted = False
    try:
        is_complete = search.run(known)
    except KeyboardInterrupt:
        if search.best is None:
            raise
        is_complete, was_interrupted = False, True
    return search.found(is_complete=is_complete, was_interrupted=was_interrupted)


@dataclass(frozen=True, slots=True)
class _Node:
    """A set of recipes: as much of the choice as is made. `exchanges`: ZeRO-2 or -3, None where it is neither."""

    layout: Layout
    keeping: Keeping
    ranks: int = 0
    exchanges: Sharding | None = None
    pipe: Pipe | None = None
    sharding: Sharding | None = None

    @property
    def depth(self) -> int:
        """How many steps of the choice are made."""
        return 1 + (self.ranks > 0) + (self.pipe is not None) + (self.sharding is not None)


_Entry = tuple[float, bool, tuple[object, ...], int, _Node]
"""An open node: bound, whether it is priced, its place among equal ones (the deepest first), its number."""

_DIVE = 8
"""Of so many nodes one is the deepest open one, and every other one until a recipe is priced."""

_OFTEN = 256
"""Nodes between two looks at the clock."""


class _BestFirst:
    """One search: its open nodes, and the best recipe so far."""

    def __init__(self, space: RecipeSpace, objective: Objective, ceiling: Ceiling, watch: Watch | None) -> None:
        self.space, self.objective, self.ceiling, self.watch = space, objective, ceiling, watch
        self.start = time.monotonic()
        self.open: list[_Entry] = []
        self.deep: list[tuple[int, float, int, _Node]] = []
        self.split: set[int] = set()
        self.numbers = count()
        self.turn = 0
        self.best: tuple[float, tuple[object, ...], Execution] | None = None
        self.bound, self.priced, self.nodes = 0.0, 0, 0

    def run(self, known: Execution | None) -> bool:
        """Search until the best recipe is found, or time is over; whether it is found."""
        if known is not None:
            self._keep(self.objective.price(known), (math.inf,), known)
        for layouts in self.space.layouts():
            if self._is_over():
                return False
            self._open_layouts(layouts)
            self._dive()
        while self._prune() and not self.open[0][1]:
            if self._is_over():
                return False
            self._split_node(*self._next())
        self.bound = math.inf if self.best is None else self.best[0]
        return True

    def _dive(self) -> None:
        """Split the deepest nodes, to have a recipe to show, and to leave out what is slower, before all are open."""
        for _ in range(1 if self.best else _DIVE):
            entry = self._deepest()
            if entry is not None:
                self._split_node(*entry)

    def _prune(self) -> bool:
        """Take out nodes that were split before, and note the bound; whether there are any left."""
        while self.open and self.open[0][3] in self.split:
            heapq.heappop(self.open)
        if self.open:
            self.bound = self.open[0][0]
        return bool(self.open)

    def _next(self) -> tuple[float, _Node]:
        """The open node to split, with its bound: that with the lowest one, or, in turn, the deepest."""
        self.turn += 1
        if self.turn % (_DIVE if self.best else 2) == 0:
            entry = self._deepest()
            if entry is not None:
                return entry
        bound, *_, number, node = heapq.heappop(self.open)
        self.split.add(number)
        return bound, node

    def _deepest(self) -> tuple[float, _Node] | None:
        """The deepest open node, the one with the lowest bound of these; None if none is open."""
        while self.deep:
            _, bound, number, node = heapq.heappop(self.deep)
            if number not in self.split and (self.best is None or bound <= self.best[0]):
                self.split.add(number)
                return bound, node
        return None

    def found(self, *, is_complete: bool, was_interrupted: bool = False) -> FoundRecipe:
        """What is found so far."""
        objective, _, recipe = (math.inf, (), None) if self.best is None else self.best
        elapsed_s = time.monotonic() - self.start
        bound = min(self.bound, objective)
        return FoundRecipe(
            recipe, objective, bound, is_complete, was_interrupted, self.priced, self.nodes, elapsed_s
        )  # fmt: skip

    def _is_over(self) -> bool:
        if self.nodes % _OFTEN == 0 and self.watch is not None:
            self.watch(self.found(is_complete=False))
        return self.ceiling.cuts()

    def _open_layouts(self, layouts: tuple[Layout, ...]) -> None:
        """Open layouts of rising micro-batch, until one is left out for its size."""
        for layout in layouts:
            sizes = list(self.space.pipelines(layout))
            first = self.space.recipe(layout, Keeping(), _any_pipe(sizes[0]), Sharding())
            if self.objective.is_too_large(first):
                return
            self._open_keepings(layout, first, sizes[-1])

    def _open_keepings(self, layout: Layout, first: Execution, most: int) -> None:
        """Open a layout with what may become of blocks' values; nothing more than what is too slow already."""
        keepings = sorted(self.space.keepings(layout), key=lambda keeping: keeping.offload != "none")
        too_slow = len(RECOMPUTE)
        bounds = self.objective.layouts(first, most, keepings, zero=self.space.most_zero)
        for keeping, bound_of in zip(keepings, bounds, strict=True):
            again = RECOMPUTE.index(keeping.recompute)
            if again < too_slow:
                bound = bound_of()
                is_open = self._push(bound, _Node(layout, keeping))
                if not is_open and bound < math.inf and self.objective.more_only_adds(keeping):
                    too_slow = again

    def _split_node(self, bound: float, node: _Node) -> None:
        """Open a node's children."""
        if not node.ranks:
            self._split_layout(node)
        elif node.pipe is None:
            self._split_pipeline(node)
        elif node.sharding is None:
            self._split_shardings(bound, node, node.pipe)
        else:
            self._price(node)

    def _split_layout(self, node: _Node) -> None:
        """Open a layout with each number of pipeline ranks, and each way to exchange shards for each micro-batch."""
        for ranks in self.space.pipelines(node.layout):
            ways = dict.fromkeys(map(_exchanges, self.space.shardings(node.layout, ranks)))
            children = [replace(node, ranks=ranks, exchanges=way) for way in ways]
            if children:
                recipes, pipes = list(map(self._recipe, children)), self.space.pipes(node.layout, ranks)
                for child, bound in zip(children, self.objective.pipelines(recipes, pipes), strict=True):
                    self._push(bound, child)

    def _split_pipeline(self, node: _Node) -> None:
        pipes = self.space.pipes(node.layout, node.ranks)
        shardings = (self._recipe(child) for child in self._sharded(node))
        bounds = self.objective.schedules(self._recipe(node), shardings, pipes)
        for bound, pipe in zip(bounds, pipes, strict=True):
            self._push(bound, node, pipe=pipe)

    def _split_shardings(self, bound: float, node: _Node, pipe: Pipe) -> None:
        known = [(child, self._recipe(child)) for child in self._sharded(node)]
        asked = [(child, recipe) for child, recipe in known if self.space.admits(recipe)]
        if not asked:
            return
        bounds = self.objective.recipes([recipe for _, recipe in asked], pipe, enough=self._enough)
        for (child, _), least in zip(asked, bounds, strict=True):
            self._push(max(bound, least), child)

    def _sharded(self, node: _Node) -> list[_Node]:
        """A node with each sharding that it may have."""
        shardings = self.space.shardings(node.layout, node.ranks)
        return [replace(node, sharding=item) for item in shardings if _exchanges(item) == node.exchanges]

    def _recipe(self, node: _Node) -> Execution:
        """The recipe of a node; of a set, one of those that shard most."""
        sharding = node.sharding or node.exchanges or Sharding(min(1, self.space.most_zero))
        return self.space.recipe(node.layout, node.keeping, node.pipe or _any_pipe(node.ranks), sharding)

    def _push(self, bound: float, node: _Node, **choice: Any) -> bool:
        """Open a node, with some more of the choice, whose bound is no worse than the best recipe; whether it is."""
        self.nodes += 1
        if self._is_hopeless(bound):
            return False
        node = replace(node, **choice) if choice else node
        number = next(self.numbers)
        entry = (bound, False, (-node.depth,), number, node)
        heapq.heappush(self.open, entry)
        heapq.heappush(self.deep, (-node.depth, bound, number, node))
        return True

    def _is_hopeless(self, bound: float) -> bool:
        """Whether nothing with such a bound is as good as the best recipe."""
        return bound == math.inf or bound > self._enough

    @property
    def _enough(self) -> float:
        """What the best recipe has: nothing with more is looked for."""
        return math.inf if self.best is None else self.best[0]

    def _price(self, node: _Node) -> None:
        recipe = self._recipe(node)
        objective = self.objective.price(recipe)
        self.priced += 1
        held = self.objective.pricer.memory_bytes(recipe)
        order = (held, node.pipe, node.layout, KEEPINGS.index(node.keeping), node.sharding)
        self._keep(objective, order, recipe)
        heapq.heappush(self.open, (objective, True, order, next(self.numbers), node))

    def _keep(self, objective: float, order: tuple[object, ...], recipe: Execution) -> None:
        """Keep a recipe if it is the best so far."""
        if self.best is None or (objective, order) < self.best[:2]:
            self.best = (objective, order, recipe)
            if self.watch is not None:
                self.watch(self.found(is_complete=False))


def _exchanges(sharding: Sharding) -> Sharding | None:
    """What decides the exchanges of each micro-batch."""
    return sharding if sharding.zero >= 2 else None


def _any_pipe(ranks: int) -> Pipe:
    """A pipeline of so many ranks, whose schedule does not count."""
    return Pipe(ranks, usual_schedule(1)) if ranks > 1 else Pipe()
