"""What a plan answers: `explain`, `why_not`, `limits`, `compare`. Figures, with the tables that show them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

from rich.table import Table

from autoshard.ir.recipe import Recipe
from autoshard.ir.spec import PartitionSpec
from autoshard.ir.text import any_block, as_text, common_name, format_bytes, format_time

if TYPE_CHECKING:
    from autoshard.ir.plan import Plan

_T = TypeVar("_T")

_SHOWN_S = 1e-9
"""Parts of a step that differ by less than this, seconds, are rounding of sums."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the best plan of some kind costs.

    Args:
        fits: whether there is such a plan within the memory limit (and the user's constraints); without, all below is
            None but `smallest_bytes`.
        objective: what the search minimises, seconds.
        lower_bound: proven bound of it, seconds.
        step_time_s: predicted time of a step.
        peak_memory_bytes: predicted peak per rank.
        breakdown: parts of the step time by name, seconds.
        hidden: communication that takes none of it, by name, seconds.
        smallest_bytes: where nothing fits for want of memory, the smallest limit that would do, bytes.
        recipe: of plans of recipes, the best one, or the one that needs the least memory, for `autoshard.price`.
    """

    fits: bool
    objective: float | None = None
    lower_bound: float | None = None
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
class ValueCost:
    """Something that a step does with a value.

    Args:
        what: in words, "gradient reduction".
        axis: over which ranks communicate; "" where they do not.
        size_bytes: what is moved each time: a rank's part of the value before it is shared out over `axis`.
        times: how often in a step.
        time_s: seconds of all of it in a step, alone: what runs beside computation is not taken off.
    """

    what: str
    axis: str
    size_bytes: int
    times: int
    time_s: float


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
        costs: what the plan's recipe does with it; of plans of recipes only.
        memory: what it holds on each device by name, bytes; likewise.
        kernels: those with which `backend="triton"` computes or reads it, in words.
    """

    name: str
    shape: tuple[int, ...]
    alike: tuple[str, ...]
    chosen: Alternative
    others: tuple[Alternative, ...]
    memory_budget: int | None
    costs: tuple[ValueCost, ...] = ()
    memory: Mapping[str, int] = field(default_factory=dict)
    kernels: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As JSON data, specs as text."""
        items = [{**asdict(item), "spec": repr(item.spec)} for item in (self.chosen, *self.others)]
        return {
            "name": self.name,
            "shape": list(self.shape),
            "alike": list(self.alike),
            "memory_budget": self.memory_budget,
            "chosen": items[0],
            "others": items[1:],
            "costs": [asdict(item) for item in self.costs],
            "memory": dict(self.memory),
            "kernels": list(self.kernels),
        }

    def __str__(self) -> str:
        limit = "without a memory limit" if self.memory_budget is None else f"within {format_bytes(self.memory_budget)}"
        together = f" (with {len(self.alike)} alike)" if self.alike else ""
        shape = "x".join(map(str, self.shape)) or "a scalar"
        table = Table("spec", "step", "beside", "peak memory", "where it differs")
        for item in (self.chosen, *self.others):
            table.add_row(repr(item.spec), *_cells(item, self.chosen))
        head = f"{self.name}: {shape}{together}; the best plan for each spec, {limit}"
        kernels = [f"backend='triton' runs {item}" for item in self.kernels]
        return as_text(head, table, *self._of_recipes(), *kernels)

    def _of_recipes(self) -> list[str | Table]:
        """The recipes in words, and what the chosen one does with the value."""
        parts: list[str | Table] = [
            f"{item.spec!r}: {item.recipe.words}." for item in (self.chosen, *self.others) if item.recipe
        ]
        if self.memory:
            held = ", ".join(f"{format_bytes(size)} of {name}" for name, size in self.memory.items())
            parts.append(f"On each device: {held}.")
        if self.costs:
            table = Table("what the step does with it", "over", "bytes", "times", "alone")
            for item in self.costs:
                size, time = format_bytes(item.size_bytes), format_time(item.time_s)
                table.add_row(item.what, item.axis, size, str(item.times), time)
            parts.append(table)
        return parts


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
        reference: of a forecast, the best recipe without it, on whose scale the variants are; None where they are plans
            of the same kind as the plan.
    """

    feature: str
    used: str
    chosen: Outcome
    variants: tuple[Variant, ...]
    memory_budget: int | None
    missing: str = "no axis of the mesh could be used so"
    reference: Variant | None = None

    def to_json(self) -> dict[str, Any]:
        """As JSON data."""
        return asdict(self)

    def __str__(self) -> str:
        if self.reference is None:
            return as_text(self._answer(), _variants_table(self.chosen, self.variants))
        table = _variants_table(self.reference, self.variants, self.reference.name)
        own = format_time(self.chosen.step_time_s or 0.0)
        return as_text(
            f"A plan of specs, as this one ({own}), has no such choice: a forecast, by recipes for the same "
            "devices, batch and memory.",
            self._answer(),
            table,
        )

    def _answer(self) -> str:
        if self.used:
            return f"The plan does use {self.feature}, {self.used}; in other ways:"
        fitting = [item for item in self.variants if item.fits]
        if not self.variants:
            return f"{self.feature}: {self.missing}."
        if not fitting:
            return f"{self.feature}: no plan with it fits in memory."
        best, other = fitting[0], self.reference or self.chosen
        if best.step_time_s is None:
            return ""
        takes = f"{self.feature}: the best plan with it, {best.name}, takes {format_time(best.step_time_s)}"
        if other.step_time_s is None:
            return f"{takes}; no plan without it fits in memory."
        beside = "the chosen one" if self.reference is None else "the best without it"
        return f"{takes}, {difference(best.step_time_s, other.step_time_s)} beside {beside}."


@dataclass(frozen=True, slots=True)
class Limits:
    """What limits a plan: what more of each resource would be worth, by planning again with it.

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
        chosen = self.chosen.objective
        gains = {item.name: chosen - item.objective for item in self.variants if item.objective is not None and chosen}
        best = max(gains, key=gains.__getitem__, default="")
        return best if chosen and best and gains[best] > 1e-3 * chosen else ""

    def to_json(self) -> dict[str, Any]:
        """As JSON data."""
        return {**asdict(self), "binding": self.binding}

    def __str__(self) -> str:
        limit = "no limit" if self.memory_budget is None else f"a limit of {format_bytes(self.memory_budget)}"
        used = format_bytes(self.chosen.peak_memory_bytes or 0)
        head = f"Peak memory {used} of {limit}. What more of each would be worth, planned again with it:"
        end = f"Worth most: {self.binding}." if self.binding else "No single change is worth a thousandth of a step."
        if self.memory_worth_s_per_byte:
            end += f" A GiB more of memory is worth {format_time(2**30 * self.memory_worth_s_per_byte)} at first."
        return as_text(head, _variants_table(self.chosen, self.variants), end)


def _variants_table(chosen: Outcome, variants: tuple[Variant, ...], name: str = "the plan") -> Table:
    table = Table("", "step", "beside", "peak memory", "where it differs")
    time, word, *others = _cells(chosen, chosen)
    table.add_row(name, time, word if name == "the plan" else "", *others)
    for item in variants:
        table.add_row(item.name, *_cells(item, chosen))
    return table


def _cells(item: Outcome, chosen: Outcome) -> list[str]:
    """Step time, that beside the chosen plan's, peak memory, and the parts that differ most."""
    if item.step_time_s is None or item.peak_memory_bytes is None or item.breakdown is None:
        return ["does not fit" if item.smallest_bytes else "excluded", "", _needs(item), ""]
    if item is chosen or chosen.step_time_s is None or chosen.breakdown is None:
        word = "chosen" if item is chosen else ""
        return [format_time(item.step_time_s), word, format_bytes(item.peak_memory_bytes), ""]
    return [
        format_time(item.step_time_s),
        difference(item.step_time_s, chosen.step_time_s),
        format_bytes(item.peak_memory_bytes),
        _largest_differences({**item.breakdown, **item.hidden}, {**chosen.breakdown, **chosen.hidden}),
    ]


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
        costs = Table("", "this plan", "the other", "difference", title="Cost of one step", title_justify="left")
        costs.add_row("mesh", *self.meshes, "")
        for name, pair in self.recipe_fields.items():
            costs.add_row(f"recipe: {name}", *map(str, pair), "")
        if (self.recipes[0] is None) != (self.recipes[1] is None):
            costs.add_row("recipe", *("none: specs" if item is None else item.words for item in self.recipes), "")
        costs.add_row("step time", *map(format_time, self.step_time_s), difference(*reversed(self.step_time_s)))
        mine, others = self.tokens_per_s
        if mine is not None and others is not None:
            costs.add_row("tokens per second", f"{mine:,.0f}", f"{others:,.0f}", difference(others, mine))
        for name, (first, second) in {**self.breakdown, **self.hidden}.items():
            costs.add_row(f"  {name}", format_time(first), format_time(second), _signed(second - first, format_time))
        first, second = self.peak_memory_bytes
        costs.add_row("peak memory", format_bytes(first), format_bytes(second), difference(second, first))
        for name, (first, second) in self.memory_breakdown.items():
            costs.add_row(f"  {name}", format_bytes(first), format_bytes(second), _signed(second - first, format_bytes))
        return as_text(costs, self._specs() or "All specs are the same.")

    def _specs(self) -> Table | None:
        """The specs that differ; values that differ in numbers of their names alone share a row."""
        groups: dict[tuple[str, ...], list[str]] = {}
        for name, pair in {**self.parameters, **self.outputs}.items():
            specs = ("-" if spec is None else repr(spec) for spec in pair)
            groups.setdefault((any_block(name), *specs), []).append(name)
        if not groups:
            return None
        table = Table("value", "count", "this plan", "the other", title="Where they differ", title_justify="left")
        for (_, *specs), names in groups.items():
            table.add_row(common_name(names), str(len(names)), *specs)
        return table


def compare(first: Plan, second: Plan) -> Comparison:
    """What differs between two plans."""
    mine, others = first.predicted, second.predicted
    specs = [{name: item.spec for name, item in plan.parameters.items()} for plan in (first, second)]
    return Comparison(
        step_time_s=(mine.step_time_s, others.step_time_s),
        peak_memory_bytes=(mine.peak_memory_bytes, others.peak_memory_bytes),
        breakdown=_side_by_side(mine.breakdown, others.breakdown, 0.0),
        hidden=_side_by_side(mine.hidden, others.hidden, 0.0),
        memory_breakdown=_side_by_side(mine.memory_breakdown, others.memory_breakdown, 0),
        parameters=_differing(*specs),
        outputs=_differing(first.outputs, second.outputs),
        meshes=(str(first.mesh), str(second.mesh)),
        tokens_per_s=(mine.tokens_per_s, others.tokens_per_s),
        recipes=(first.recipe, second.recipe),
    )


def _side_by_side(first: Mapping[str, _T], second: Mapping[str, _T], absent: _T) -> dict[str, tuple[_T, _T]]:
    return {name: (first.get(name, absent), second.get(name, absent)) for name in {**first, **second}}


def _differing(
    first: Mapping[str, PartitionSpec], second: Mapping[str, PartitionSpec]
) -> dict[str, tuple[PartitionSpec | None, PartitionSpec | None]]:
    pairs = {name: (first.get(name), second.get(name)) for name in {**first, **second}}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _largest_differences(parts: Mapping[str, float], others: Mapping[str, float]) -> str:
    """The two parts that differ most: `communication over data +1.2 ms`."""
    changes = {name: parts.get(name, 0.0) - others.get(name, 0.0) for name in {**parts, **others}}
    largest = sorted(changes.items(), key=lambda item: -abs(item[1]))[:2]
    return ", ".join(f"{name} {_signed(change, format_time)}" for name, change in largest if abs(change) >= _SHOWN_S)


def _needs(item: Outcome) -> str:
    return f"needs {format_bytes(item.smallest_bytes)}" if item.smallest_bytes else ""


def difference(value: float, reference: float) -> str:
    """A change as a share: `+12.5%`."""
    if reference <= 0:
        return "-"
    change = f"{value / reference - 1:+.1%}"
    return "+0.0%" if change == "-0.0%" else change


def _signed(change: float, text: Callable[[float], str]) -> str:
    return f"{'-' if change < 0 else '+'}{text(abs(change))}"
