"""From one recipe to another, one part of it at a time: what each part of their difference is worth.

1. A part is a set of fields that mean something together (`PARTS`).
2. Starting from the first recipe, of all parts that still differ the one is changed next that leaves the shortest
   step; where no part can be changed alone (micro-batches would not divide the batch, say), the best pair, and so on.
3. Every recipe on the way is priced whole, as `autoshard.price` does, so each step's worth can be checked by hand, and
   the product of all is the ratio of the two prices. Recipes on the way need not fit in memory: what they take is told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from autoshard import RecipeError
from autoshard.ir.execution import Execution

PARTS: Mapping[str, tuple[str, ...]] = {
    "recomputation": ("recompute",),
    "offload": ("offload",),
    "micro-batch": ("micro_batch",),
    "schedule": ("schedule", "virtual_stages", "stage_layers"),
    "sequence parallelism": ("sequence_parallel",),
    "ZeRO": ("zero", "zero_group"),
    "axes": ("data", "tensor", "context", "pipeline"),
    "experts": ("expert", "expert_tensor"),
}
"""Fields that change together."""


@dataclass(frozen=True, slots=True)
class Taken:
    """Cost of a training step: seconds, and bytes of the fullest rank."""

    seconds: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Step:
    """Some parts changed, and what the recipe takes with them."""

    parts: tuple[str, ...]
    taken: Taken

    @property
    def name(self) -> str:
        """Its parts, joined."""
        return " and ".join(self.parts)


def steps_between(start: Execution, end: Execution, price: Callable[[Execution], Taken]) -> list[Step]:
    """The way from one recipe to another.

    Args:
        start, end: recipes that differ in no fields but those of `PARTS`.
        price: of a recipe.

    Raises:
        RecipeError: `end` cannot be priced.
    """
    steps: list[Step] = []
    current = start
    while left := differing(current, end):
        step, current = _best_change(current, end, left, price)
        steps.append(step)
    return steps


def differing(one: Execution, other: Execution) -> list[str]:
    """The parts in which two recipes differ."""
    return [name for name, fields in PARTS.items() if any(getattr(one, f) != getattr(other, f) for f in fields)]


def _best_change(
    current: Execution, end: Execution, left: Sequence[str], price: Callable[[Execution], Taken]
) -> tuple[Step, Execution]:
    """The change of the fewest parts that can be priced; of these the one with the shortest step."""
    for size in range(1, len(left)):
        found = [
            (Step(names, price_), recipe)
            for names in combinations(left, size)
            for recipe, price_ in _priced(current, end, names, price)
        ]
        if found:
            return min(found, key=lambda each: each[0].taken.seconds)
    return Step(tuple(left), price(end)), end


def _priced(
    current: Execution, end: Execution, names: Sequence[str], price: Callable[[Execution], Taken]
) -> list[tuple[Execution, Taken]]:
    """A recipe with some parts of another, and its price; none where there is no such recipe."""
    try:
        recipe = with_parts(current, end, names)
        return [] if set(names) & set(differing(recipe, end)) else [(recipe, price(recipe))]
    except RecipeError:
        return []


def with_parts(recipe: Execution, other: Execution, names: Sequence[str]) -> Execution:
    """A recipe with some parts of another; what means nothing on the new axes is dropped.

    Raises:
        RecipeError: there is no such recipe.
    """
    change = {field: getattr(other, field) for name in names for field in PARTS[name]}
    if change.get("pipeline", recipe.pipeline) == 1:
        change |= {"schedule": None, "virtual_stages": 1, "stage_layers": None}
    if change.get("tensor", recipe.tensor) == 1:
        change["sequence_parallel"] = False
    return replace(recipe, **change)
