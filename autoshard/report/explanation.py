"""Tables of a plan's answers: `explain`, `why_not`, `limits`, `compare`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rich.table import Table

from autoshard.ir.answers import Comparison, Explanation, Limits, Outcome, Variant, WhyNot
from autoshard.ir.show import text_of
from autoshard.ir.text import any_block, as_text, common_name, format_bytes, format_time, table

_SHOWN_S = 1e-9
"""Smallest difference in seconds between parts of two steps that is shown. Smaller differences come from rounding."""


_OUTCOME = ("step", "beside", "peak memory", "where it differs")
"""Columns of the tables of plans, after a first column that names the plan."""


@text_of.register
def explanation_text(explained: Explanation) -> str:
    """Return the text of `plan.explain`: a table with the possible specs of a value, each with the best plan for it."""
    limit = (
        "without a memory limit"
        if explained.memory_budget is None
        else f"within {format_bytes(explained.memory_budget)}"
    )
    together = f" (with {len(explained.alike)} alike)" if explained.alike else ""
    shape = "x".join(map(str, explained.shape)) or "a scalar"
    rows = [(repr(item.spec), *_cells(item, explained.chosen)) for item in (explained.chosen, *explained.others)]
    head = f"{explained.name}: {shape}{together}; the best plan for each spec, {limit}"
    kernels = [f"backend='triton' runs {item}" for item in explained.kernels]
    return as_text(head, table(("spec", *_OUTCOME), rows), *kernels)


@text_of.register
def why_not_text(answer: WhyNot) -> str:
    """Return the text of `plan.why_not`: the answer in words, and a table of ways, each with its best plan."""
    return as_text(_answer(answer), _variants_table(answer.chosen, answer.variants))


def _answer(answer: WhyNot) -> str:
    missing = answer.missing.rstrip(".")
    if answer.used:
        ways = "other plans:" if answer.variants or not missing else f"no other plan: {missing}."
        return f"The plan does use {answer.feature}, {answer.used}; {ways}"
    fitting = [item for item in answer.variants if item.fits]
    if not answer.variants:
        return f"{answer.feature}: {missing}."
    if not fitting:
        is_short = any(item.smallest_bytes for item in answer.variants)
        return f"{answer.feature}: no plan with it {'fits in memory' if is_short else 'was found'}."
    best, other = fitting[0], answer.chosen
    if best.step_time_s is None or other.step_time_s is None:
        return ""
    takes = f"{answer.feature}: the best plan with it, {best.name}, takes {format_time(best.step_time_s)}"
    return f"{takes}, {difference(best.step_time_s, other.step_time_s)} beside the chosen one."


@text_of.register
def limits_text(limits: Limits) -> str:
    """Return the text of `plan.limits`: a table of changes such as more memory, each with its best plan."""
    limit = "no limit" if limits.memory_budget is None else f"a limit of {format_bytes(limits.memory_budget)}"
    used = format_bytes(limits.chosen.peak_memory_bytes or 0)
    head = f"Peak memory {used} of {limit}. The worth of more of each, by planning with more:"
    end = f"Worth most: {limits.binding}." if limits.binding else "No single change is worth a thousandth of a step."
    if limits.memory_worth_s_per_byte:
        end += f" A GiB more of memory is worth {format_time(2**30 * limits.memory_worth_s_per_byte)} at first."
    return as_text(head, _variants_table(limits.chosen, limits.variants), end)


@text_of.register
def comparison_text(both: Comparison) -> str:
    """Return the text of `plan.compare`: a table of the costs of two plans, and a table of specs that differ."""
    costs = Table("", "this plan", "the other", "difference", title="Cost of one step", title_justify="left")
    costs.add_row("mesh", *both.meshes, "")
    for name, pair in both.recipe_fields.items():
        costs.add_row(f"recipe: {name}", *map(str, pair), "")
    if (both.recipes[0] is None) != (both.recipes[1] is None):
        costs.add_row("recipe", *("none: specs" if item is None else item.words for item in both.recipes), "")
    costs.add_row("step time", *map(format_time, both.step_time_s), difference(*reversed(both.step_time_s)))
    mine, others = both.tokens_per_s
    if mine is not None and others is not None:
        costs.add_row("tokens per second", f"{mine:,.0f}", f"{others:,.0f}", difference(others, mine))
    for name, (first, second) in {**both.breakdown, **both.hidden}.items():
        costs.add_row(f"  {name}", format_time(first), format_time(second), _signed(second - first, format_time))
    first, second = both.peak_memory_bytes
    costs.add_row("peak memory", format_bytes(first), format_bytes(second), difference(second, first))
    for name, (first, second) in both.memory_breakdown.items():
        costs.add_row(f"  {name}", format_bytes(first), format_bytes(second), _signed(second - first, format_bytes))
    return as_text(costs, _specs(both) or "All specs are the same.")


def _specs(both: Comparison) -> Table | None:
    """Return a table of differing specs. Values whose names differ only in numbers share a row."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, pair in {**both.parameters, **both.outputs}.items():
        specs = ("-" if spec is None else repr(spec) for spec in pair)
        groups.setdefault((any_block(name), *specs), []).append(name)
    if not groups:
        return None
    rows = [(common_name(names), str(len(names)), *specs) for (_, *specs), names in groups.items()]
    return table(("value", "count", "this plan", "the other"), rows, "Where they differ")


def _variants_table(chosen: Outcome, variants: tuple[Variant, ...]) -> Table:
    rows = [("the plan", *_cells(chosen, chosen)), *((item.name, *_cells(item, chosen)) for item in variants)]
    return table(("", *_OUTCOME), rows)


def _cells(item: Outcome, chosen: Outcome) -> list[str]:
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


def _largest_differences(parts: Mapping[str, float], others: Mapping[str, float]) -> str:
    """Return text on the two parts of a step whose seconds in `parts` differ most from those in `others`.

    For example: `communication over data +1.2 ms`.
    """
    changes = {name: parts.get(name, 0.0) - others.get(name, 0.0) for name in {**parts, **others}}
    largest = sorted(changes.items(), key=lambda item: -abs(item[1]))[:2]
    return ", ".join(f"{name} {_signed(change, format_time)}" for name, change in largest if abs(change) >= _SHOWN_S)


def _needs(item: Outcome) -> str:
    return f"needs {format_bytes(item.smallest_bytes)}" if item.smallest_bytes else ""


def difference(value: float, reference: float) -> str:
    """Return the relative change from a reference value as text: `+12.5%`; "-" if the reference is not above 0."""
    if reference <= 0:
        return "-"
    change = f"{value / reference - 1:+.1%}"
    return "+0.0%" if change == "-0.0%" else change


def _signed(change: float, text: Callable[[float], str]) -> str:
    return f"{'-' if change < 0 else '+'}{text(abs(change))}"
