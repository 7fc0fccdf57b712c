"""Errors of predicted training steps against published steps.

Run: python -m tests.benchmarks.cost_accuracy [--write] [--quick] [--recount]

Every usable row of tests/data/published_runs.jsonl is built as a model on meta and priced with `autoshard.price`. The
rows are copied from the project's shared data, each with its source. The numbers of `cost_models.step` are fitted to
all sources but one, and the errors are errors on the source left out. `--quick` uses the numbers in the data file
instead. `--write` fits to all sources and writes the data files.

Tracing and counting the models' layer classes takes several minutes once. The counts stay on disk
(`tests.benchmarks.layer_table`) until the counting passes change. `--recount` counts anew. Everything else takes a
minute or two. Rows in 16 and in 8 bits are separate, and the fit sees rows in 16 bits alone. Sources have equal
weights. Peak memory is compared after an offset for each way of measuring. The offset is the median of the rows of
other plans, and stands for the memory of driver, libraries and allocator besides tensors.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import combinations
from pathlib import Path

import torch

import autoshard
from autoshard.ir.execution import Execution
from autoshard.ir.plan_parts import Prediction
from cost_models import constants
from cost_models.constants import Constant
from cost_models.errors import CostModelError
from cost_models.hardware import Cluster
from cost_models.intervals import (
    EIGHT_BITS,
    KERNELS,
    RECIPES,
    Uncertainty,
)
from cost_models.memory import communicator_bytes, context_bytes
from cost_models.step import ALONE, InStep, in_step
from passes.search.layers.price_model import RecipeKind
from passes.search.pipeline_stages import Stage
from passes.search.price_recipe import Step
from passes.search.recipe_groups import recipe_groups
from passes.search.recipe_plan import predict_recipe
from tests.benchmarks.accuracy_metrics import attainable, bias, mape, regret, repeatability, spearman
from tests.benchmarks.layer_table import LayerTable
from tests.benchmarks.published_runs import Row, cluster_of, is_16_bit, model_shape, more_rows, read_rows, recipe_of
from tests.benchmarks.step_fit import FITTED, Runs, fit_all, leave_one_out
from tests.benchmarks.uncertainty import conformal, keep_step_time_uncertainty

RUNTIME = Path(constants.__file__).parent / "data" / "runtime"
GIB = 2**30
LEAST_GROUP = 5
START = InStep(ramp=0.0)
"""The factors with which fits begin; the ramp is not fitted."""


@dataclass
class Pricer:
    """Prices rows as `autoshard.price` does, from kept layer classes."""

    table: LayerTable

    def predict(self, row: Row, step: InStep | None) -> Prediction:
        """The prediction for a row's recipe."""
        recipe = recipe_of(row)
        model = self.table.model(model_shape(row), RecipeKind.of(recipe))
        return predict_recipe(model, recipe, _cluster(row, step))

    def seconds(self, row: Row, step: InStep | None) -> float:
        """Predicted seconds of a row's step, or of the forward and backward of one timed block."""
        if row["kind"] != "layer":
            return self.predict(row, step).step_time_s
        recipe, cluster = recipe_of(row), _cluster(row, step)
        model = self.table.model(model_shape(row), RecipeKind.of(recipe))
        stage = Stage(((model.blocks[0], 1),))
        prices, groups = model.layer_prices(recipe, cluster), recipe_groups(recipe, cluster)
        price = Step(prices, [stage], recipe, groups, cluster)
        return price.time_s - price.breakdown.get("optimizer", 0.0)


def _cluster(row: Row, step: InStep | None) -> Cluster:
    """A row's machines. With `step`, its factors replace those of the data file."""
    found = cluster_of(row)
    return found if step is None else Cluster(found.node, found.nodes, found.devices_per_node, step)


@dataclass(frozen=True, slots=True)
class Result:
    """A row with its prediction by a model that did not see its source, and the errors on other sources."""

    row: Row
    predicted_s: float
    uncertainty: Uncertainty

    @property
    def source(self) -> str:
        """The key of the row's source."""
        return self.row["source"]["key"]

    @property
    def log_error(self) -> float:
        """log(predicted / measured)."""
        return math.log(self.predicted_s / measured_s(self.row))

    @property
    def is_covered(self) -> bool:
        """Whether the measurement lies in the interval."""
        low, high = self.uncertainty.interval(self.predicted_s)
        return low <= measured_s(self.row) <= high


def measured_s(row: Row) -> float:
    """Seconds of the row's step, or of its layer's forward and backward."""
    if row["kind"] == "layer":
        return (row["measured"]["layer_fwd_ms"] + row["measured"]["layer_bwd_ms"]) / 1000
    return row["derived"]["step_time_s"]


def timed_rows(rows: Sequence[Row]) -> list[Row]:
    """Return rows of pretraining with a timed step or a timed layer."""
    return [row for row in rows if row["task"] == "pretrain"
            and (row["kind"] == "layer" or row["derived"]["step_time_s"] is not None)]  # fmt: skip


Evaluation = tuple[list[Result], list[Result], InStep]


def why_refused(pricer: Pricer, row: Row) -> str:
    """Return the first line of the error that refuses a row; empty for a row with a price."""
    try:
        pricer.seconds(row, None)
    except (autoshard.AutoshardError, CostModelError) as error:
        return str(error).splitlines()[0]
    return ""


def left_out_results(pricer: Pricer, rows: Sequence[Row], extra: Sequence[Row]) -> Evaluation:
    """Three results: `rows`, each source priced by a fit to the other sources, then `extra`, priced by the full
    fit, then the full fit."""
    sources = [row["source"]["key"] for row in rows]
    start = START
    runs = Runs(sources, [measured_s(row) for row in rows], lambda index, model: _time(pricer, rows[index], model))
    whole = fit_all(runs, start)
    fits = leave_one_out(runs, start, whole)
    times = [_time(pricer, row, fits[source]) for row, source in zip(rows, sources, strict=True)]
    more = _with_uncertainty(extra, [_time(pricer, row, whole[0]) for row in extra])
    return _with_uncertainty(rows, times), more, whole[0]


def quick_results(pricer: Pricer, rows: Sequence[Row], extra: Sequence[Row]) -> Evaluation:
    """Return results by the numbers in the data file, which were fitted to these rows."""
    known, more = (_with_uncertainty(some, [_time(pricer, row, in_step()) for row in some]) for some in (rows, extra))
    return known, more, in_step()


def further_results(pricer: Pricer, model: InStep, refused: dict[str, str]) -> Mapping[bool, list[Result]]:
    """Results of `more_rows` by a fit, separately for 16 bits (True) and other rows (False). Rows without a price
    are added to `refused`."""
    rows = sorted(timed_rows(more_rows()), key=lambda row: str(model_shape(row)))
    refused |= {row["id"]: reason for row in rows if (reason := why_refused(pricer, row))}
    priced = [row for row in rows if row["id"] not in refused]
    both = {narrow: [row for row in priced if is_16_bit(row) is narrow] for narrow in (True, False)}
    return {
        narrow: _with_uncertainty(some, [_time(pricer, row, model) for row in some]) for narrow, some in both.items()
    }


def _time(pricer: Pricer, row: Row, model: InStep) -> float:
    return pricer.seconds(row, model)


def _with_uncertainty(rows: Sequence[Row], times: Sequence[float]) -> list[Result]:
    blank = Uncertainty(0.0, 0.9)
    first = [Result(row, seconds, blank) for row, seconds in zip(rows, times, strict=True)]
    by_source = {item.source: conformal_by_source(first, leaving_out=item.source) for item in first}
    return [Result(item.row, item.predicted_s, by_source[item.source]) for item in first]


def conformal_by_source(results: Sequence[Result], *, leaving_out: str | None) -> Uncertainty:
    """Return the 90 % interval from the errors of the other sources, with equal weight for each source."""
    errors: dict[str, list[float]] = defaultdict(list)
    for item in results:
        if item.source != leaving_out:
            errors[item.source].append(abs(item.log_error))
    return conformal([_quantile(sorted(values), place / 40) for values in errors.values() for place in range(1, 40)])


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def group_of(row: Row) -> tuple[object, ...]:
    """The key of a row's group. Rows of a group have the same model, sequence length and cluster, and differ in
    their plans."""
    hardware = row["hardware"]
    model = row["model"]
    name = f"{model['name']} (layer)" if row["kind"] == "layer" else model["name"]
    return row["source"]["key"], name, model["seq_len"], hardware["gpu"], hardware["n_gpus"]


def per_token(item: Result) -> tuple[float, float]:
    """Return predicted and measured seconds per sequence, which rank plans with unequal batches."""
    return item.predicted_s / item.row["global_batch"], measured_s(item.row) / item.row["global_batch"]


def report(title: str, results: Sequence[Result]) -> list[str]:
    """Return a table of errors by source.

    "own speed known" is the MAPE without a source's median error, as if a model knew the speed of the source's machines
    and software. A model of recipes and datasheets cannot know this speed.
    """
    lines = [
        f"## {title}",
        "",
        "| source | rows | MAPE | bias | own speed known | 90 % interval covers |",
        "|---|---|---|---|---|---|",
    ]
    by_source: dict[str, list[Result]] = defaultdict(list)
    for item in results:
        by_source[item.source].append(item)
    table = {}
    for source, items in by_source.items():
        errors = [item.log_error for item in items]
        covered = statistics.fmean(item.is_covered for item in items)
        own = mape([error - statistics.median(errors) for error in errors])
        table[source] = (mape(errors), bias(errors), own, covered)
        lines.append(_line(source, len(items), table[source]))
    means = [statistics.fmean(column) for column in zip(*table.values(), strict=True)]
    lines.append(_line("**sources equally**", len(results), means))
    return [*lines, ""]


def _line(name: str, rows: int, numbers: Sequence[float]) -> str:
    error, offset, own, covered = numbers
    return f"| {name} | {rows} | {error:.1%} | {offset:+.1%} | {own:.1%} | {covered:.0%} |"


def rank_report(results: Sequence[Result]) -> list[str]:
    """Rank correlation and regret in every group of enough rows."""
    groups: dict[tuple[object, ...], list[Result]] = defaultdict(list)
    for item in results:
        groups[group_of(item.row)].append(item)
    lines = [
        "| group | rows | Spearman | regret | attainable | repeatable | spread of repeats | within noise |",
        "|---|---|---|---|---|---|---|---|",
    ]
    found = []
    for group, items in groups.items():
        if len(items) >= LEAST_GROUP:
            predicted, measured = zip(*map(per_token, items), strict=True)
            found.append((spearman(predicted, measured), regret(predicted, measured)))
            label = " ".join(map(str, group))
            lines.append(f"| {label} | {len(items)} | {found[-1][0]:.2f} | {found[-1][1]:.1%} | {_limits(items)} |")
    if found:
        good = sum(rho >= 0.9 - 1e-9 for rho, _ in found)
        lines.append(f"| **{good} of {len(found)} groups at 0.9** | | {statistics.fmean(r for r, _ in found):.2f} | "
                     f"{statistics.fmean(r for _, r in found):.1%} | | | | |")  # fmt: skip
    return [*lines, ""]


def _limits(items: Sequence[Result]) -> str:
    """Return four cells that bound the rank correlation of a group.

    1. The best rank correlation of any function of the rows' fields, because some rows have equal fields.
    2. The rank correlation of repeated measurements at the file's `noise_rel`.
    3. The largest over the smallest time of rows with equal fields.
    4. The share of pairs whose times differ by less than two standard deviations of their difference.
    """
    measured = [per_token(item)[1] for item in items]
    said = [(model_shape(item.row), recipe_of(item.row)) for item in items]
    noise = statistics.fmean(item.row["noise_rel"] for item in items)
    same: dict[object, list[float]] = defaultdict(list)
    for key, seconds in zip(said, measured, strict=True):
        same[key].append(seconds)
    spread = max(max(times) / min(times) - 1 for times in same.values())
    pairs = [abs(math.log(one / two)) for one, two in combinations(measured, 2)]
    close = statistics.fmean(gap < 2 * math.sqrt(2) * noise for gap in pairs)
    return f"{attainable(said, measured):.2f} | {repeatability(measured, noise):.2f} | {spread:.0%} | {close:.0%}"


def beside_tensors(recipe: Execution) -> dict[str, int]:
    """The bytes that a device holds besides PyTorch's tensors, as counted by the driver (nvidia-smi).

    The bytes are NCCL's buffers, for one communicator of all ranks and one per group of the recipe, and the CUDA
    context.
    """
    sizes = (recipe.devices, recipe.tensor, recipe.context, recipe.replicas, recipe.expert, recipe.pipeline)
    communicators = sum(size > 1 for size in sizes)
    return {"communicators": communicator_bytes(communicators), "context": context_bytes()}


def memory_report(pricer: Pricer, rows: Sequence[Row]) -> list[str]:
    """Return errors of peak memory by source and definition, with an offset for each definition, and without.

    All definitions are the driver's, which counts memory besides tensors too.
    """
    by_definition: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        measured = row["measured"].get("peak_mem_gib")
        if measured is not None and is_16_bit(row):
            beside = sum(beside_tensors(recipe_of(row)).values())
            predicted = (pricer.predict(row, None).peak_memory_bytes + beside) / GIB
            by_definition[row["source"]["key"], row["measured"]["mem_definition"]].append((predicted, measured))
    lines = [
        "| source | definition | rows | offset, GiB | mean error | mean error without offset |",
        "|---|---|---|---|---|---|",
    ]
    for (source, definition), pairs in by_definition.items():
        errors = []
        for place, (predicted, measured) in enumerate(pairs):
            others = [b - a for index, (a, b) in enumerate(pairs) if index != place]
            errors.append(abs((predicted + statistics.median(others or [0.0])) / measured - 1))
        offset = statistics.median(b - a for a, b in pairs)
        plain = statistics.fmean(abs(a / b - 1) for a, b in pairs)
        lines.append(
            f"| {source} | {definition} | {len(pairs)} | {offset:+.1f} | {statistics.fmean(errors):.1%} | {plain:.1%} |"
        )
    return [*lines, ""]


def write_fit(model: InStep, results: Sequence[Result], eight: Sequence[Result], unweighed: Sequence[Result]) -> None:
    """Write the data files of the step model and of the intervals: of the full fit, of 8-bit rows, and without any
    fit (`unweighed`)."""
    sources = [item.source for item in results]
    source = f"fit to 16-bit rows of tests/data/published_runs.jsonl: {', '.join(dict.fromkeys(sources))}"
    date = time.strftime("%Y-%m-%d")
    items = {}
    for item in fields(InStep):
        note = source if item.name in FITTED else "not fitted"
        items[item.name] = Constant(round(getattr(model, item.name), 3), "1", note, date)
    (RUNTIME / "step.toml").write_text(constants.dump({"name": "step"}, items), encoding="utf-8")
    kinds = (
        (RECIPES, results, "sources left out of the fit"),
        (EIGHT_BITS, eight, "8-bit rows, none of which was fitted to"),
        (KERNELS, unweighed, "no fit"),
    )
    for kind, found, what in kinds:
        names = ", ".join(dict.fromkeys(item.source for item in found))
        source = f"errors on {what}, tests/benchmarks/cost_accuracy.py: {names}"
        keep_step_time_uncertainty(kind, conformal_by_source(found, leaving_out=None), source, date)


def main(arguments: Sequence[str]) -> str:
    """Print the report that the module's docstring describes, with the options in `arguments`."""
    rows = sorted(timed_rows(read_rows()), key=lambda row: str(model_shape(row)))
    pricer = Pricer(LayerTable(recount="--recount" in arguments))
    refused = {row["id"]: reason for row in rows if (reason := why_refused(pricer, row))}
    narrow = [row for row in rows if not is_16_bit(row) and row["id"] not in refused]
    wide = [row for row in rows if is_16_bit(row) and row["id"] not in refused]
    evaluate = quick_results if "--quick" in arguments else left_out_results
    results, eight, model = evaluate(pricer, wide, narrow)
    if "--write" in arguments:
        alone = [_time(pricer, row, ALONE) for row in wide]
        write_fit(model, results, eight, _with_uncertainty(wide, alone))
    further = further_results(pricer, model, refused)
    how = "numbers of the data file" if "--quick" in arguments else "each source by a fit to the others"
    numbers: Mapping[str, float] = {name: round(getattr(model, name), 3) for name in FITTED}
    lines = [
        f"# Accuracy of predicted steps ({time.strftime('%Y-%m-%d')}, torch {torch.__version__})",
        "",
        f"Fit to all sources: {numbers}",
        "",
        *report(f"16 bits, {how}", results),
        *rank_report(results),
        *report("8 bits, fit to all 16-bit sources", eight),
        *report("Further sources, of which the fit saw none: 16 bits", further[True]),
        *rank_report(further[True]),
        *report("Further sources: 8 bits", further[False]),
        "Rows that could not be priced:",
        "",
        *(f"* {name}: {reason}" for name, reason in refused.items()),
        "",
        "## Peak memory",
        "",
        *memory_report(pricer, read_rows()),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(main(sys.argv[1:]) + "\n")
