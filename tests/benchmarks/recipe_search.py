"""Is what the search finds ever worse than what experts ran? Published runs beside the best recipe for the same task.

Run: python -m tests.benchmarks.recipe_search --out runs.jsonl [--sources mosaicml ...] [--every 10] [--seconds 60]
     [--minutes 30]

For each run the recipe that was published is priced, and the fastest recipe searched for the same model, cluster and
batch, with what the software did where that is no choice of a recipe (precision, overlap, fused kernels) held fast. A
found recipe must not be priced above the published one, if that fits in memory by our count. Runs of one *task*
(model, cluster, batch, and what is held fast) share one search; tasks of one model its trace and what its sections
cost. Each run is kept when it is done; those that are there are not done again.

If the plan is priced more than 20 % lower, two more searches say for whom it was there to take: within what the
run's software offered (`run_software`), and within that with an eighth of the device's memory left free. And the way
from the published recipe to the plan is priced part by part (`recipe_steps`). `recipe_report` writes all that down.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby
from pathlib import Path

import torch

from autoshard import Cluster
from autoshard.ir.execution import Execution
from passes.driver.pricing import priced_model
from passes.recipe_search.recipe_problem import RecipeProblem
from passes.recipes.recipe_plan import predict_recipe
from passes.sections.price_model import CountedModel
from passes.solver.search_control import Ceiling
from tests.benchmarks.decoder import Decoder, DecoderShape
from tests.benchmarks.published_runs import Row, cluster_of, model_shape, read_rows, recipe_of
from tests.benchmarks.recipe_report import report
from tests.benchmarks.recipe_runs import LOWER, Compared, Priced, Reason, read_lines, write_line
from tests.benchmarks.recipe_steps import Taken, steps_between
from tests.benchmarks.run_software import OFFERED, lacking

_FREE = 1 / 8
"""Part of a device's memory left for other data than tensors: BigScience's A100s held 9.3 GiB of 80 that we do not
count (by nvidia-smi; tests/benchmarks/results/cost_accuracy_2026-11-22.md)."""


@dataclass(frozen=True, slots=True)
class Task:
    """A search's request: a model, a cluster, and the fields of a recipe that are no choice, like the global batch."""

    shape: DecoderShape
    cluster: Cluster
    base: Execution

    @classmethod
    def of(cls, row: Row) -> Task:
        """The task of a run."""
        return cls(model_shape(row), cluster_of(row), base_of(recipe_of(row)))

    @property
    def name(self) -> str:
        """A digest."""
        cluster = f"{self.cluster.node.name} {self.cluster.nodes} {self.cluster.devices_per_node} {self.cluster.node}"
        return hashlib.sha256(f"{self.shape} {cluster} {self.base}".encode()).hexdigest()[:12]


def base_of(recipe: Execution) -> Execution:
    """The fields of a recipe that are no choice."""
    return Execution(
        runtime=recipe.runtime, optimizer=recipe.optimizer, precision=recipe.precision, global_batch=recipe.global_batch
    )


@lru_cache(maxsize=1)
def counted(shape: DecoderShape) -> CountedModel:
    """A run's model; the latest is kept."""
    with torch.device("meta"):
        model = Decoder(shape).bfloat16()
    tokens = torch.zeros(1, shape.sequence, dtype=torch.int64, device="meta")
    return priced_model(model, (tokens, tokens), None).counted


def compare(task: Task, source: str, rows: Sequence[Row], seconds: float) -> Iterator[Compared]:
    """The runs of one task beside what one search finds for it."""
    model, limit = counted(task.shape), task.cluster.device.memory_bytes
    search = RecipeProblem(model, task.cluster, task.base, limit)
    offered = Offered(search, source, seconds)
    start = time.process_time()
    found = search.best(ceiling=Ceiling.within(seconds))
    spent_s = time.process_time() - start
    if found.was_interrupted:
        raise KeyboardInterrupt
    plan = None if found.recipe is None else priced(search, found.recipe)
    on_device_s = None if found.recipe is None else best_on_device_s(search, found.recipe, seconds)
    for row in rows:
        run = Compared(
            run=row["id"],
            source=source,
            task=task.name,
            device_bytes=limit,
            measured_s=row["derived"]["step_time_s"],
            published=priced(search, recipe_of(row)),
            found=plan,
            bound_s=found.lower_bound,
            is_proven=found.is_complete,
            search_s=spent_s,
            on_device_s=on_device_s,
        )
        if found.recipe is not None and run.ratio < LOWER:
            run = replace(run, reason=why_lower(offered, recipe_of(row), found.recipe))
        yield run


def best_on_device_s(search: RecipeProblem, found: Execution, seconds: float) -> float | None:
    """Seconds of the fastest recipe that keeps all on the device, if the found one does not; None if none fits, too."""
    if found.offload == "none":
        return None
    best = search.best(only={"offload": ("none",)}, ceiling=Ceiling.within(seconds))
    return None if best.recipe is None else best.objective


def priced(search: RecipeProblem, recipe: Execution) -> Priced:
    """A recipe of a search with its price."""
    prediction = predict_recipe(search.counted, recipe, search.cluster)
    return Priced(recipe.words, prediction.step_time_s, prediction.memory_breakdown)


@dataclass
class Offered:
    """The fastest that a source's software offered for a task, by the memory that it may take.

    Args:
        search: of the task.
        source: the key of the source.
        seconds: for each search.
    """

    search: RecipeProblem
    source: str
    seconds: float
    _best: dict[float, float | None] = field(default_factory=dict)

    def best_s(self, limit: float) -> float | None:
        """Seconds of its step; None where none fits.

        Raises:
            TimeoutError: a search did not come to its end.
        """
        if limit not in self._best:
            found = [
                self.search.within(limit).best(only=only, ceiling=Ceiling.within(self.seconds))
                for only in OFFERED[self.source]
            ]
            if not all(each.is_complete for each in found):
                raise TimeoutError(
                    f"{self.source}: no proof of the fastest recipe that it offered in {self.seconds} s."
                )
            self._best[limit] = min((each.objective for each in found if each.recipe is not None), default=None)
        return self._best[limit]


def why_lower(offered: Offered, recipe: Execution, found: Execution) -> Reason:
    """For whom the found recipe was there to take, and what each part of it is worth."""
    search = offered.search
    room = max((1 - _FREE) * search.memory_limit, taken(search, recipe).memory_bytes)
    return Reason(
        tuple(steps_between(recipe, found, lambda between: taken(search, between))),
        lacking(found, offered.source),
        offered_s=offered.best_s(search.memory_limit),
        roomy_s=offered.best_s(room),
    )


def taken(search: RecipeProblem, recipe: Execution) -> Taken:
    """Time and memory of a recipe."""
    prediction = predict_recipe(search.counted, recipe, search.cluster)
    return Taken(prediction.step_time_s, prediction.peak_memory_bytes)


def usable_rows() -> list[Row]:
    """Published runs that recipes describe: four bits have no price, and adapters (LoRA) are no training of all."""
    return [row for row in read_rows() if not row["dtype"].startswith("nvfp4") and row["task"] != "lora"]


def tasks_of(rows: Sequence[Row], every: int) -> list[tuple[str, Task, list[Row]]]:
    """Rows by source and task; of each source one task of so many, those of one model beside each other."""
    keyed = sorted(((row["source"]["key"], Task.of(row), row) for row in rows), key=lambda item: str(item[:2]))
    tasks = [
        (source, task, [row for *_, row in items])
        for (source, task), items in groupby(keyed, key=lambda item: item[:2])
    ]
    by_source = groupby(tasks, key=lambda item: item[0])
    return [task for _, items in by_source for task in list(items)[::every]]


def main(arguments: list[str]) -> int:
    """Print the report; the exit status says whether the search is never worse."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.recipe_search")
    parser.add_argument("--out", type=Path, required=True, help="lines of JSON; runs that are in it are not repeated")
    parser.add_argument("--sources", nargs="*", help="keys of sources; default: all")
    parser.add_argument("--every", type=int, default=1, help="one of so many tasks of each source")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each search")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no search begins after so many")
    options = parser.parse_args(arguments)
    rows = [row for row in usable_rows() if options.sources is None or row["source"]["key"] in options.sources]
    known = {item.run for item in read_lines(options.out)}
    end = time.monotonic() + 60 * options.minutes
    for source, task, runs in tasks_of(rows, options.every):
        left = [row for row in runs if row["id"] not in known]
        if not left or time.monotonic() > end:
            continue
        with options.out.open("a") as kept:
            kept.writelines(write_line(item) for item in compare(task, source, left, options.seconds))
    compared = read_lines(options.out)
    sys.stdout.write(report(compared) + "\n")
    return int(not all(item.holds for item in compared))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
