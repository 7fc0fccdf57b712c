"""Answers of a plan: `explain`, `why_not`, `limits`, `compare`. `autoshard.report` shows them in tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from autoshard.ir.recipe import Recipe
from autoshard.ir.show import text_of
from autoshard.ir.spec import PartitionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Cost of the best plan of some kind.

    Args:
        fits: whether there is such a plan within the memory limit (and the user's constraints); without, all below is
            None but `smallest_bytes`.
        step_time_s: predicted time of a step.
        peak_memory_bytes: predicted peak per rank.
        breakdown: parts of the step time by name, seconds.
        hidden: communication that takes none of it, by name, seconds.
        smallest_bytes: where nothing fits for want of memory, the smallest limit that would do, bytes.
        recipe: of plans of recipes, the best one, or the one that needs the least memory, for `autoshard.price`.
    """

    fits: bool
    step_time_s: float | None = None
    peak_memory_bytes: int | None = None
    breakdown: Mapping[str, float] | None = None
    hidden: Mapping[str, float] = field(default_factory=dict)
    smallest_bytes: int | None = None
    recipe: Recipe | None = None


@dataclass(frozen=True, slots=True)
class Alternative(Outcome):
    """One spec that a value could have, with the best plan that gives it this spec."""

    spec: PartitionSpec


@dataclass(frozen=True, slots=True)
class Variant(Outcome):
    """Something else that could be so, in words, with the best plan then."""

    name: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a value lies as it does: each spec that it could have, and what the best plan with it costs.

    Args:
        name: qualified name of the value.
        shape: its global shape.
        alike: names of the other values that are chosen together with it: the same place of repeated blocks.
        chosen: the plan's own spec.
        others: all others, the cheapest first, those that do not fit last.
        memory_budget: bytes per device, or None.
        kernels: those with which `backend="triton"` computes or reads it, in words.
    """

    name: str
    shape: tuple[int, ...]
    alike: tuple[str, ...]
    chosen: Alternative
    others: tuple[Alternative, ...]
    memory_budget: int | None
    kernels: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """JSON data, specs as text."""
        items = [{**asdict(item), "spec": repr(item.spec)} for item in (self.chosen, *self.others)]
        return {
            "name": self.name,
            "shape": list(self.shape),
            "alike": list(self.alike),
            "memory_budget": self.memory_budget,
            "chosen": items[0],
            "others": items[1:],
            "kernels": list(self.kernels),
        }

    def __str__(self) -> str:
        return text_of(self)


@dataclass(frozen=True, slots=True)
class WhyNot:
    """Why a plan does not do something, or what doing it costs: the best plan that does it in each way.

    Args:
        feature: what was asked for: "tensor", "fsdp", ...
        used: where the plan does it already ("over model", "in its recipe (...)"); "" where it does not.
        chosen: the plan itself.
        variants: each other way of doing it ("tensor over data"), the cheapest first, those that do not fit last.
        memory_budget: bytes per device, or None.
        missing: why there is no such plan at all, in words.
    """

    feature: str
    used: str
    chosen: Outcome
    variants: tuple[Variant, ...]
    memory_budget: int | None
    missing: str

    def to_json(self) -> dict[str, Any]:
        """JSON data."""
        return asdict(self)

    def __str__(self) -> str:
        return text_of(self)


@dataclass(frozen=True, slots=True)
class Limits:
    """The worth of more of each resource, found by planning again with it.

    Args:
        chosen: the plan itself.
        variants: each change ("10 % more memory") with the best plan under it, in a fixed order.
        memory_budget: bytes per device, or None.
        memory_worth_s_per_byte: by how much a step is shorter for each byte more, in the mean of a tenth more memory
            (its shadow price); None without a limit.
    """

    chosen: Outcome
    variants: tuple[Variant, ...]
    memory_budget: int | None
    memory_worth_s_per_byte: float | None = None

    @property
    def binding(self) -> str:
        """The change that is worth most, or "" where none is worth a thousandth of a step."""
        chosen = self.chosen.step_time_s
        gains = {item.name: chosen - item.step_time_s for item in self.variants if item.step_time_s and chosen}
        best = max(gains, key=gains.__getitem__, default="")
        return best if chosen and best and gains[best] > 1e-3 * chosen else ""

    def to_json(self) -> dict[str, Any]:
        """JSON data."""
        return {**asdict(self), "binding": self.binding}

    def __str__(self) -> str:
        return text_of(self)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two plans of one model side by side.

    Args:
        step_time_s, peak_memory_bytes: of the first and of the second.
        breakdown, memory_breakdown: part to what each spends on it, seconds and bytes; 0 where it has no such part.
        hidden: the same of communication that takes none of the step's time, seconds.
        parameters: parameters whose specs differ, to both; None where a plan has no such parameter.
        outputs: the same of results of the program ("gradient w", "output output:0").
        meshes: both meshes as text.
        tokens_per_s: of both, None where inputs are no tokens. Steps of a recipe and of specs have other batches.
        recipes: of both; None for a plan that was searched spec by spec.
    """

    step_time_s: tuple[float, float]
    peak_memory_bytes: tuple[int, int]
    breakdown: Mapping[str, tuple[float, float]]
    hidden: Mapping[str, tuple[float, float]]
    memory_breakdown: Mapping[str, tuple[int, int]]
    parameters: Mapping[str, tuple[PartitionSpec | None, PartitionSpec | None]]
    outputs: Mapping[str, tuple[PartitionSpec | None, PartitionSpec | None]]
    meshes: tuple[str, str]
    tokens_per_s: tuple[float | None, float | None]
    recipes: tuple[Recipe | None, Recipe | None]

    @property
    def recipe_fields(self) -> dict[str, tuple[object, object]]:
        """The fields in which two recipes differ, with both values; empty where one plan has no recipe."""
        first, second = self.recipes
        if first is None or second is None:
            return {}
        pairs = {item.name: (getattr(first, item.name), getattr(second, item.name)) for item in fields(Recipe)}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    def __str__(self) -> str:
        return text_of(self)
