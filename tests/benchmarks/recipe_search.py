"""Is what the search finds ever worse than what experts ran? Published runs beside the best recipe for the same task.

Run: python -m tests.benchmarks.recipe_search [--sources mosaicml ...] [--every 10] [--seconds 60] [--out results.json]

For each run the recipe that was published is priced, and the fastest recipe searched for the same model, cluster and
batch, with what the software did where that is no choice of a recipe (precision, overlap, fused kernels) held fast. A
found recipe must not be priced above the published one, if that fits in memory by our count. Where it is priced more
than 20 % lower, each group of fields in which the two differ is changed alone in the published recipe, and priced; runs
are grouped by the fields that make most of the difference.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path

import torch

from autoshard import Cluster, Recipe, RecipeError
from autoshard.pricing import priced_model
from passes.price_model import CountedModel
from passes.recipe_plan import predict_recipe
from passes.recipe_problem import RecipeProblem
from passes.recipe_space import SEARCHED
from tests.benchmarks.decoder import Decoder, DecoderShape
from tests.benchmarks.published_runs import Row, cluster_of, model_shape, read_rows, recipe_of

CHOICES: Mapping[str, tuple[str, ...]] = {
    "axes": ("data", "tensor", "context", "pipeline", "virtual_stages", "schedule", "split_ends", "sequence_parallel"),
    "experts": ("expert", "expert_tensor"),
    "ZeRO": ("zero", "zero_group"),
    "micro-batch": ("micro_batch",),
    "recomputation": ("recompute",),
    "schedule": ("schedule", "virtual_stages", "split_ends"),
    "sequence parallelism": ("sequence_parallel",),
}
"""Fields that change together, in the order in which they are tried."""

_LOWER = 0.8

_TOO_LARGE = "does not fit alone"


@dataclass(frozen=True, slots=True)
class Compared:
    """A published run beside what was found.

    Args:
        run: its id in the data.
        recipe_s, found_s: prices of a step; found_s is infinite where nothing was found in time.
        fits: whether the published recipe fits in memory, by our count.
        words: of the found recipe; `published`: of the other.
        is_proven: whether the search came to its end; `bound_s`: nothing is faster than this.
        search_s: seconds of CPU.
        alone: by group of fields that differ, the step of the published recipe with those alone changed, or why not.
    """

    run: str
    recipe_s: float
    found_s: float
    fits: bool
    words: str
    published: str
    is_proven: bool
    bound_s: float
    search_s: float
    alone: Mapping[str, float | str]

    @property
    def ratio(self) -> float:
        """Found over published."""
        return self.found_s / self.recipe_s

    @property
    def cause(self) -> str:
        """The fields that alone make at least half of the difference (of logarithms); else less recomputation, if that
        fits with other changes only; else "several"."""
        gains = {name: value for name, value in self.alone.items() if not isinstance(value, str)}
        best = min(gains, key=gains.__getitem__, default="")
        is_most = bool(best) and 2 * math.log(gains[best] / self.recipe_s) <= math.log(self.ratio)
        if is_most:
            return best
        kept = "computed again" in self.published and self.alone.get("recomputation") == _TOO_LARGE
        return "recomputation, which fits with others only" if kept else "several"

    @property
    def holds(self) -> bool:
        """Whether it is no worse, or cannot be compared."""
        return not self.fits or self.ratio <= 1.0


@lru_cache(maxsize=1)
def counted(shape: DecoderShape) -> CountedModel:
    """A run's model; the latest is kept."""
    with torch.device("meta"):
        model = Decoder(shape).bfloat16()
    tokens = torch.zeros(1, shape.sequence, dtype=torch.int64, device="meta")
    return priced_model(model, (tokens, tokens), None).counted


@lru_cache(maxsize=1)
def problem(shape: DecoderShape, cluster: Cluster, base: Recipe) -> RecipeProblem:
    """The search for a run; runs that differ in what is searched share it."""
    return RecipeProblem(counted(shape), cluster, base, cluster.device.memory_bytes)


def base_of(recipe: Recipe) -> Recipe:
    """What of a recipe is no choice."""
    kept = {item.name: getattr(recipe, item.name) for item in fields(Recipe) if item.name not in SEARCHED}
    return Recipe(**kept, zero=int(recipe.whole_tensors))


def compare(row: Row, seconds: float) -> Compared:
    """One run."""
    recipe, cluster, shape = recipe_of(row), cluster_of(row), model_shape(row)
    search = problem(shape, cluster, base_of(recipe))
    published = predict_recipe(search.counted, recipe, cluster)
    start = time.process_time()
    found = search.best(time_budget_s=seconds)
    spent_s = time.process_time() - start
    if found.was_interrupted:
        raise KeyboardInterrupt
    lower = found.recipe is not None and found.objective < _LOWER * published.step_time_s
    return Compared(
        run=row["id"],
        recipe_s=published.step_time_s,
        found_s=found.objective,
        fits=published.peak_memory_bytes <= cluster.device.memory_bytes,
        words="nothing" if found.recipe is None else found.recipe.words,
        published=recipe.words,
        is_proven=found.is_complete,
        bound_s=found.lower_bound,
        search_s=spent_s,
        alone=changed_alone(search, recipe, found.recipe) if lower and found.recipe is not None else {},
    )


def changed_alone(search: RecipeProblem, recipe: Recipe, found: Recipe) -> dict[str, float | str]:
    """The step of a recipe with one group of fields as in another."""
    steps: dict[str, float | str] = {}
    for name, names in CHOICES.items():
        change = {field: getattr(found, field) for field in names}
        if all(getattr(recipe, field) == value for field, value in change.items()):
            continue
        try:
            changed = replace(recipe, **change)
            step = predict_recipe(search.counted, changed, search.cluster)
        except RecipeError:
            steps[name] = "not alone"
            continue
        fits = step.peak_memory_bytes <= search.memory_limit
        steps[name] = step.step_time_s if fits else _TOO_LARGE
    return steps


def table(compared: Sequence[Compared]) -> str:
    """Markdown: one line for each run, those with the lowest ratio first."""
    lines = ["| run | published s | found s | ratio | proven | found | fields changed alone in the published recipe |"]
    lines.append("|---|---|---|---|---|---|---|")
    for item in sorted(compared, key=lambda item: item.ratio):
        alone = ", ".join(
            f"{name} {value if isinstance(value, str) else f'{value / item.recipe_s:.3f}'}"
            for name, value in item.alone.items()
        )
        fits = "" if item.fits else " (does not fit)"
        lines.append(
            f"| {item.run} | {item.recipe_s:.4g}{fits} | {item.found_s:.4g} | {item.ratio:.3f} | "
            f"{'yes' if item.is_proven else f'bound {item.bound_s:.4g} s'} | {item.words} | {alone} |"
        )
    return "\n".join(lines)


_STEPS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Between which ratios are counted."""


def distribution(compared: Sequence[Compared]) -> str:
    """How many published recipes that fit cost how much more than what was found, and why."""
    fitting = [item for item in compared if item.fits]
    places = Counter(bisect_left(_STEPS, item.ratio) for item in fitting)
    names = [f"up to {step}" for step in _STEPS] + [f"above {_STEPS[-1]}"]
    lines = ["| found over published | runs |", "|---|---|"]
    lines += [f"| {name} | {places[place]} |" for place, name in enumerate(names)]
    lines += ["", f"| below {_LOWER}: what makes most of it alone | runs | sources |", "|---|---|---|"]
    lower = [item for item in fitting if item.ratio < _LOWER]
    for cause, count in Counter(item.cause for item in lower).most_common():
        sources = sorted({item.run.split("-")[0] for item in lower if item.cause == cause})
        lines.append(f"| {cause} | {count} | {', '.join(sources)} |")
    return "\n".join(lines)


def summary(compared: Sequence[Compared]) -> str:
    """In one line."""
    worse = [item.run for item in compared if not item.holds]
    ratios = sorted(item.ratio for item in compared if item.fits)
    middle = ratios[len(ratios) // 2] if ratios else float("nan")
    proven = sum(item.is_proven for item in compared)
    lower = sum(ratio < _LOWER for ratio in ratios)
    return (
        f"{len(compared)} runs, {len(ratios)} of whose recipes fit by our count; found ones cost {middle:.3f} of them "
        f"(median), {lower} below {_LOWER}; {proven} searches proven; worse than published: {worse or 'none'}."
    )


def main(arguments: list[str]) -> int:
    """Print the table; the exit status says whether the search is never worse."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.recipe_search")
    parser.add_argument("--sources", nargs="*", help="keys of sources; default: all")
    parser.add_argument("--every", type=int, default=1, help="one of so many runs of each source")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each search")
    parser.add_argument("--out", type=Path, help="JSON, written after every run; runs that are in it are not repeated")
    options = parser.parse_args(arguments)
    rows = [row for row in read_rows() if not row["dtype"].startswith("nvfp4")]  # four bits have no price
    rows = [row for row in rows if options.sources is None or row["source"]["key"] in options.sources]
    by_source: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row["source"]["key"], str(model_shape(row)), str(cluster_of(row)))):
        by_source.setdefault(row["source"]["key"], []).append(row)
    known = json.loads(options.out.read_text()) if options.out is not None and options.out.exists() else []
    compared = [Compared(**item) for item in known]
    for row in (row for each in by_source.values() for row in each[:: options.every]):
        if row["id"] not in {item.run for item in compared}:
            compared.append(compare(row, options.seconds))
            if options.out is not None:
                options.out.write_text(json.dumps([asdict(item) for item in compared], indent=1) + "\n")
    sys.stdout.write(f"{summary(compared)}\n\n{distribution(compared)}\n\n{table(compared)}\n")
    return int(not all(item.holds for item in compared))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
