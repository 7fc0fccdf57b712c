"""Answers of a plan: `explain`, `why_not`, `limits`, `compare`. `autoshard.report` prints them as tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Protocol, TypeVar

from autoshard.ir.mesh import Mesh
from autoshard.ir.plan_parts import ParameterPlan, Prediction
from autoshard.ir.recipe import Recipe
from autoshard.ir.show import text_of
from autoshard.ir.spec import PartitionSpec

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Cost of the fastest plan that meets one condition, such as a given spec of a value.

    Args:
        fits: whether a plan under the condition fits memory and the user's constraints; if not, only `smallest_bytes`
            may be given.
        step_time_s: predicted seconds of a step.
        peak_memory_bytes: predicted peak memory of each rank.
        breakdown: seconds of each part of the step, by the part's name.
        hidden: seconds of communication hidden behind computation, by name ("hidden: communication over data").
        smallest_bytes: the smallest sufficient memory limit per device, in bytes, if plans fail for want of memory.
        recipe: the recipe of the best plan, to pass to `autoshard.price`; None if the plan has no recipe.
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
    """One possible spec of a value, with the cost of the best plan in which the value has this spec."""

    spec: PartitionSpec


@dataclass(frozen=True, slots=True)
class Variant(Outcome):
    """Cost of the best plan under a changed condition. `name` is the condition in words, e.g. "10 % more memory"."""

    name: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """Answer of `Plan.explain`: each possible spec of a value, with the cost of the best plan that has it.

    Args:
        name: qualified name of the value.
        shape: global shape of the value.
        alike: names of other values that have the same spec, because they are at the same place in repeated blocks.
        chosen: the plan's own spec.
        others: all other specs, the cheapest first; specs that fit in no plan come last.
        memory_budget: memory limit of a device in bytes, or None.
        kernels: kernels of `backend="triton"` that compute or read the value, in words.
    """

    name: str
    shape: tuple[int, ...]
    alike: tuple[str, ...]
    chosen: Alternative
    others: tuple[Alternative, ...]
    memory_budget: int | None
    kernels: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the answer as JSON data, with specs as text such as "P('data', None)"."""
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
    """Answer of `Plan.why_not`: the best plan for each way to have a feature.

    Args:
        feature: the feature in question, such as "tensor" or "fsdp".
        used: how the plan uses the feature ("over model", "in its recipe (...)"), or "" if it does not.
        chosen: predicted cost of the plan itself.
        variants: each other way ("tensor over data"), the cheapest first; ways that do not fit come last.
        memory_budget: memory limit of a device in bytes, or None.
        missing: why the answer has no `variants`, in words; "" if it has some.
    """

    feature: str
    used: str
    chosen: Outcome
    variants: tuple[Variant, ...]
    memory_budget: int | None
    missing: str

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON data, under their own names."""
        return asdict(self)

    def __str__(self) -> str:
        return text_of(self)


@dataclass(frozen=True, slots=True)
class Limits:
    """Answer of `Plan.limits`: the time that more memory or faster hardware saves, found by planning again.

    Args:
        chosen: predicted cost of the plan itself.
        variants: each change ("10 % more memory") with the best plan under it, in a fixed order.
        memory_budget: memory limit of a device in bytes, or None.
        memory_worth_s_per_byte: seconds saved per step for each further byte (the shadow price), found by planning with
            10 % more memory; None without a limit.
    """

    chosen: Outcome
    variants: tuple[Variant, ...]
    memory_budget: int | None
    memory_worth_s_per_byte: float | None = None

    @property
    def binding(self) -> str:
        """Name of the change that saves most time, or "" if no change saves a thousandth of a step."""
        chosen = self.chosen.step_time_s
        gains = {item.name: chosen - item.step_time_s for item in self.variants if item.step_time_s and chosen}
        best = max(gains, key=gains.__getitem__, default="")
        return best if chosen and best and gains[best] > 1e-3 * chosen else ""

    def to_json(self) -> dict[str, Any]:
        """Return the fields and `binding` as JSON data, under their own names."""
        return {**asdict(self), "binding": self.binding}

    def __str__(self) -> str:
        return text_of(self)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two plans of one model side by side. Each pair has the first plan's value, then the second plan's value.

    Args:
        step_time_s, peak_memory_bytes: predicted seconds of a step, and peak bytes of a rank.
        breakdown, memory_breakdown: seconds of a step and bytes of its peak, by part; 0 for a plan without the part.
        hidden: seconds of hidden communication, by name.
        parameters: both specs of each parameter whose spec differs; None for a plan without the parameter.
        outputs: both specs of each result whose spec differs, by kind and name ("gradient w", "output output:0").
        meshes: both meshes as text.
        tokens_per_s: tokens per second of both plans; compare these if the plans have different batches. None for a
            plan whose inputs are no tokens.
        recipes: the recipe of each plan; None for a plan whose specs were searched.
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
        """Name of each recipe field that differs, to its values in both plans; empty if a plan has no recipe."""
        first, second = self.recipes
        if first is None or second is None:
            return {}
        pairs = {item.name: (getattr(first, item.name), getattr(second, item.name)) for item in fields(Recipe)}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    def __str__(self) -> str:
        return text_of(self)


class Compared(Protocol):
    """A plan, as far as a comparison reads it."""

    @property
    def predicted(self) -> Prediction:
        """The predicted cost of a step."""
        ...

    @property
    def parameters(self) -> Mapping[str, ParameterPlan]:
        """The layout of each parameter, by name."""
        ...

    @property
    def outputs(self) -> Mapping[str, PartitionSpec]:
        """The spec of each result, by kind and name."""
        ...

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        ...

    @property
    def recipe(self) -> Recipe | None:
        """The recipe; None where all specs were searched."""
        ...


def side_by_side(first: Compared, second: Compared) -> Comparison:
    """Return the comparison of two plans."""
    mine, others = first.predicted, second.predicted
    specs = [{name: item.spec for name, item in plan.parameters.items()} for plan in (first, second)]
    return Comparison(
        step_time_s=(mine.step_time_s, others.step_time_s),
        peak_memory_bytes=(mine.peak_memory_bytes, others.peak_memory_bytes),
        breakdown=_both(mine.breakdown, others.breakdown, 0.0),
        hidden=_both(mine.hidden, others.hidden, 0.0),
        memory_breakdown=_both(mine.memory_breakdown, others.memory_breakdown, 0),
        parameters=_differing(*specs),
        outputs=_differing(first.outputs, second.outputs),
        meshes=(str(first.mesh), str(second.mesh)),
        tokens_per_s=(mine.tokens_per_s, others.tokens_per_s),
        recipes=(first.recipe, second.recipe),
    )


def _both(first: Mapping[str, _T], second: Mapping[str, _T], absent: _T) -> dict[str, tuple[_T, _T]]:
    return {name: (first.get(name, absent), second.get(name, absent)) for name in {**first, **second}}


def _differing(
    first: Mapping[str, PartitionSpec], second: Mapping[str, PartitionSpec]
) -> dict[str, tuple[PartitionSpec | None, PartitionSpec | None]]:
    pairs = {name: (first.get(name), second.get(name)) for name in {**first, **second}}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
