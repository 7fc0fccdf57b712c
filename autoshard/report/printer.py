"""Plans as text: the tables of `print(plan)`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.table import Table

from autoshard.ir.kernels import KernelUse
from autoshard.ir.offload import Offload
from autoshard.ir.plan import BEFORE, Plan
from autoshard.ir.plan_parts import ParameterPlan
from autoshard.ir.recompute import Recompute
from autoshard.ir.show import text_of
from autoshard.ir.text import any_block, as_text, common_name, format_bytes, format_time, table

_SHOWN_CALLS, _SHOWN_INPUTS = 4, 6

_FASTER = 1.005
"""The least ratio of step times for which a plan is called faster than another."""

_TOLD = 0.05
"""`in_words` names a layout of an axis only if at least this share of all parameters has the layout."""


@text_of.register
def render_plan(plan: Plan) -> str:
    """Return a plan as text with tables, without colours, as wide as the terminal but at most 110 columns.

    The main figures come first, then the work of each mesh axis, then everything else.
    """
    kernels, whole, known = plan.predicted.kernels, plan.replicated_operators, baseline_rows(plan)
    tables = [table(("recipe", "step", "of this plan's"), known, "Known recipes")] if known else []
    tables += [table(_STAGE, stage_rows(plan), "Stages")] if plan.stages else []
    tables += [table(_PARAMETER, parameter_rows(plan.parameters), "Parameters"), _cost_table(plan)]
    tables += [table(_KERNEL, _kernel_rows(kernels.uses), "Kernels")] if kernels.uses else []
    lines = [(operator, line or "-") for operator, line in whole]
    tables += [table(("operator without a rule", "line"), lines, "Runs whole on every device")] if whole else []
    figures = table(("predicted", "value"), lead_rows(plan))
    return as_text(title(plan), figures, *in_words(plan), *notes(plan), *running_lines(plan), *tables)


_STAGE = ("stage", "rank", "parameters", "busy", "computed again", "peak of its rank")
_PARAMETER = ("parameter", "count", "shape", "spec", "bytes per device")
_KERNEL = ("kernel", "phase", "times", "launches saved", "bytes saved", "the first stands for")


def title(plan: Plan) -> str:
    """Return the heading of a plan: its mesh and precision, the priced hardware, and the duration of the search."""
    gap = "" if plan.gap is None or plan.runs else f", at most {plan.gap:.2%} from the fastest recipe"
    precision = "" if plan.precision is None else f" in {plan.precision}"
    searched = f"searched {format_time(plan.search_time_s)}{gap}"
    return f"Plan on {plan.mesh}{precision}, priced for {plan.hardware}; {searched}."


def lead_rows(plan: Plan) -> list[tuple[str, str]]:
    """Return rows (name, value) of the main figures: step time, tokens per second, utilisation, peak memory."""
    predicted = plan.predicted
    rows = [("step", f"{format_time(predicted.step_time_s)}{_interval(plan)}")]
    if predicted.tokens_per_s is not None:
        rows.append(("tokens/s", f"{predicted.tokens_per_s:,.0f}"))
    if predicted.mfu is not None:
        rows.append(("model FLOPs utilisation", f"{predicted.mfu:.1%}"))
    limit = "no limit" if plan.memory_budget is None else f"of {format_bytes(plan.memory_budget)}"
    return [*rows, ("peak memory per device", f"{format_bytes(predicted.peak_memory_bytes)}, {limit}")]


def notes(plan: Plan) -> list[str]:
    """Return sentences on the schedule, recomputation, offload and kernels, and on the reliability of the figures."""
    predicted = plan.predicted
    lines = [
        "A prediction for another runtime, which overlaps communication with computation."
        if predicted.overlaps
        else "",
        "The search was interrupted: this is the best plan until then." if plan.was_interrupted else "",
        "The search was cut by time_budget_s: with more time the plan may be another." if plan.was_cut else "",
        _previous(plan),
        _schedule(plan),
        _recompute(plan),
        _offload(plan),
        f"With {predicted.kernels}." if predicted.kernels.uses else "",
    ]
    return [line for line in lines if line]


def _previous(plan: Plan) -> str:
    """Return a sentence on the plan that was given as `previous`; "" without such a plan."""
    speedup, before_s = plan.speedup_over_previous, plan.baselines.get(BEFORE)
    if speedup is None or before_s is None:
        return "The previous plan does not fit here." if BEFORE in plan.baselines else ""
    if speedup < _FASTER:
        return f"No faster plan than the previous plan was found, which takes {format_time(before_s)} here."
    return f"The previous plan would take {format_time(before_s)} here, {speedup:.2f} times as long as this plan."


def in_words(plan: Plan) -> list[str]:
    """Return a list of one sentence on the work of all mesh axes; an empty list if there is nothing to say.

    For example: "Axis data splits inputs and copies all parameters; axis model splits 98% of parameters." A plan
    without parameters, or the price of a recipe in another framework, gives an empty list.
    """
    axes = [axis for axis, size in plan.mesh.axes if size > 1]
    if not plan.parameters or not axes or not plan.runs or not (plan.nodes or plan.stages):
        return []
    said = "; ".join(f"axis {axis} {_work_of(axis, plan)}" for axis in axes)
    return [f"{said[0].upper()}{said[1:]}."]


_WORK = {
    "ZeRO-3": "shards {} (ZeRO-3)",
    "ZeRO-2": "shards gradients and optimizer state of {} (ZeRO-2)",
    "ZeRO-1": "shards the optimizer state of {} (ZeRO-1)",
    "split": "splits {}",
    "copied": "copies {}",
}
"""Phrases for the work of an axis on parameters. The keys are the words of `passes.prediction.name_layouts`."""


def _work_of(axis: str, plan: Plan) -> str:
    """Return the work of an axis as a phrase: "splits inputs and copies all parameters", or "carries 4 stages"."""
    first = plan.stages[0] if plan.stages else plan
    if axis not in first.mesh.axis_names:
        return f"carries {len(plan.stages)} stages"
    inputs = [first.nodes[name].outputs[0] for name in first.nodes if name.startswith("input_")]
    work = ["splits inputs"] if any(axis in spec.sharded_axes for spec in inputs) else []
    counts: dict[str, int] = {}
    for item in plan.parameters.values():
        kind = _kinds(item).get(axis, "copied")
        counts[kind] = counts.get(kind, 0) + math.prod(item.shape)
    total = sum(counts.values())
    for kind, count in sorted(counts.items(), key=lambda pair: -pair[1]):
        if count >= _TOLD * total:
            part = "all parameters" if count >= 0.995 * total else f"{count / total:.0%} of parameters"
            work.append(_WORK[kind].format(part))
    return " and ".join((", ".join(work[:-1]), work[-1])) if len(work) > 1 else work[0]


def _kinds(item: ParameterPlan) -> dict[str, str]:
    """Return the layout of a parameter along each axis that shards it: {"data": "ZeRO-3"}. Other axes hold copies."""
    if not item.layout:
        return dict.fromkeys(item.spec.sharded_axes, "split")
    parts = (part.partition(" over ") for part in item.layout.split("; "))
    return {axis: kind for kind, _, axes in parts for axis in axes.split(", ")}


def running_lines(plan: Plan) -> list[str]:
    """Return lines on the recipe of a plan, on the batch of a step, and on the `compile` call that runs the plan."""
    lines = [_batch(plan)]
    if plan.recipe is not None:
        lines.insert(0, f"Recipe: {plan.recipe.words}.")
    if plan.runs:
        trains = plan.recipe is not None or plan.updates or plan.stages
        given = f"model, {plan.mesh}{', optimizer=...' if trains else ''}, plan=plan"
        parts = f", in {plan.micro_batches} micro-batches" if plan.micro_batches > 1 else ""
        return [*lines, f"compile({given}) runs it{parts}."]
    if plan.offload.host_bytes:
        size, time = format_bytes(plan.offload.host_bytes), format_time(plan.offload.time_s)
        lines.append(f"Offload: {size} on the host for each device, at most; {time} of a step's copies are waited for.")
    if plan.recipe is not None and plan.recipe.without_program:
        lacking = plan.recipe.without_program
        return [*lines, f"The price of a run under runtime={plan.runtime!r}. compile has no program for {lacking}."]
    return [
        *lines,
        f"The price of a run under runtime={plan.runtime!r}. For compile, plan with recipe=plan.recipe.",
    ]


def _batch(plan: Plan) -> str:
    """Return a line on the batch: sequences under a recipe, otherwise the inputs of a call or of a micro-batch."""
    recipe = plan.recipe
    parts = plan.micro_batches if plan.order is None else plan.order.micro_batches
    if recipe is not None and recipe.micro_batch is not None and recipe.data is not None:
        cut = f", in {parts} micro-batches" if parts > 1 else ""
        return f"Batch: {parts * recipe.micro_batch * recipe.data} sequences{cut}."
    shown = [f"{name} {text}" for name, text in plan.inputs.items()]
    more = f" and {len(shown) - _SHOWN_INPUTS} others" if len(shown) > _SHOWN_INPUTS else ""
    title = f"Inputs of each of {parts} micro-batches" if parts > 1 else "Inputs"
    return f"{title}: {', '.join(shown[:_SHOWN_INPUTS]) or 'none'}{more}."


def _schedule(plan: Plan) -> str:
    if plan.order is None:
        return ""
    ranks, virtual, bubble = len(plan.order.ranks), plan.order.virtual_stages, plan.predicted.breakdown.get("bubble", 0)
    each = f" ({virtual} on each)" if virtual > 1 else ""
    share = bubble / plan.predicted.step_time_s if plan.predicted.step_time_s > 0 else 0.0
    count = plan.order.micro_batches
    return (
        f"Schedule {plan.schedule}: {len(plan.stages)} stages on {ranks} ranks{each}, {count} "
        f"micro-batch{'' if count == 1 else 'es'}, bubble {share:.0%}."
    )


def _first_and_last(names: Sequence[str]) -> str:
    return " to ".join(dict.fromkeys((names[0], names[-1]))) if names else ""


def stage_rows(plan: Plan) -> list[tuple[str, ...]]:
    """Return a row for each stage: number, rank, parameters, busy time, recomputed nodes, peak memory of the rank."""
    assert plan.order is not None, "stages run in an order"
    return [
        (
            str(number),
            str(rank),
            _first_and_last(list(stage.parameters)),
            format_time(stage.predicted.step_time_s),
            str(len(stage.recompute.nodes)),
            format_bytes(stage.predicted.peak_memory_bytes),
        )
        for number, (stage, rank) in enumerate(zip(plan.stages, plan.order.stage_ranks, strict=True))
    ]


def _recompute(plan: Plan) -> str:
    return f"Recompute: {_saving(plan.recompute, plan.recomputed)}." if plan.recompute.nodes else ""


def _offload(plan: Plan) -> str:
    if not plan.offload.nodes:
        return ""
    host = format_bytes(plan.offload.host_bytes)
    return f"Offload: {_saving(plan.offload, plan.offloaded)}; {host} on the host for each device."


def _saving(item: Recompute | Offload, nodes: Mapping[str, Sequence[str]]) -> str:
    saved, time, count = format_bytes(item.saved_bytes), format_time(item.time_s), sum(map(len, nodes.values()))
    modules = ", ".join(dict.fromkeys(any_block(module) or "the model" for module in nodes))
    return f"{count} of {item.candidates} nodes, {saved} saved for {time}: {modules}"


def _interval(plan: Plan) -> str:
    interval, coverage = plan.predicted.step_time_interval_s, plan.predicted.interval_coverage
    if interval is None or coverage is None:
        return ""
    return f" ({coverage:.0%}: {format_time(interval[0])} to {format_time(interval[1])})"


def parameter_rows(parameters: Mapping[str, ParameterPlan]) -> list[tuple[str, str, str, str, str]]:
    """Return rows (names, count, shape, spec, bytes on each device) of parameters.

    Parameters of equal shape and spec whose names differ only in numbers share a row.
    """
    groups: dict[tuple[str, tuple[int, ...], str], list[str]] = {}
    for name, item in parameters.items():
        groups.setdefault((any_block(name), item.shape, repr(item.spec)), []).append(name)
    return [
        (
            common_name(names),
            str(len(names)),
            "x".join(map(str, shape)),
            spec,
            format_bytes(sum(parameters[name].local_bytes for name in names)),
        )
        for (_, shape, spec), names in groups.items()
    ]


def _cost_table(plan: Plan) -> Table:
    predicted = plan.predicted
    parts = {**predicted.breakdown, **predicted.hidden}
    rows = [(name, format_time(seconds)) for name, seconds in parts.items()]
    rows += [(f"memory: {name}", format_bytes(size)) for name, size in predicted.memory_breakdown.items()]
    return table(("predicted", "value"), [*rows, *figure_rows(plan)], "Cost of one step")


def figure_rows(plan: Plan) -> list[tuple[str, str]]:
    """Return rows (name, value) of secondary predictions: hardware utilisation, load of experts, parameter layouts."""
    predicted, total = plan.predicted, sum(plan.layouts.values())
    rows: list[tuple[str, str]] = []
    if predicted.hfu is not None:
        rows.append(("hardware FLOPs utilisation", f"{predicted.hfu:.1%}"))
    if predicted.expert_load is not None:
        rows.append(("busiest experts, assumed", f"{predicted.expert_load:.2f} x the mean of tokens"))
    shares = {layout: count / total for layout, count in plan.layouts.items() if count}
    rows += [(f"layout: {layout}", f"{share:.1%} of parameters") for layout, share in shares.items()]
    return rows


def baseline_rows(plan: Plan) -> list[tuple[str, str, str]]:
    """Return a row for each known recipe: name, predicted step time, and its ratio to the plan's step time."""
    own_s = plan.predicted.step_time_s
    return [
        (name, "does not fit", "")
        if seconds is None
        else (name, format_time(seconds), f"{seconds / own_s:.2f} x" if own_s > 0 else "")
        for name, seconds in plan.baselines.items()
    ]


def _kernel_rows(uses: Iterable[KernelUse]) -> Iterator[tuple[str, ...]]:
    alike: dict[tuple[str, str], list[KernelUse]] = {}
    for use in uses:
        alike.setdefault((use.name, use.phase), []).append(use)
    for (name, phase), same in alike.items():
        launches = sum(use.times * use.saved_launches for use in same)
        saved = format_bytes(sum(use.times * use.saved_bytes for use in same))
        calls = [*same[0].stands_for, *(f"copy of {name}" for name, *_ in same[0].copies)]
        shown = ", ".join(calls[:_SHOWN_CALLS]) + (", ..." if len(calls) > _SHOWN_CALLS else "")
        yield name, phase, str(sum(use.times for use in same)), str(launches), saved, shown
