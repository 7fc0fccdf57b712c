"""Compare each published run with the best found recipe for its task.

Run: python -m tests.benchmarks.recipe_search --out runs.jsonl [--sources mosaicml ...] [--every 10] [--seconds 60]
     [--minutes 30]

For each run the published recipe is priced. The fastest recipe is searched for the same model, cluster and batch.
Fields that no recipe chooses (precision, overlap, fused kernels) stay as in the software of the run. A found recipe
must not have a higher price than the published recipe, if the latter fits by our count. Runs of one *task* (model,
cluster, batch, fixed fields) share one search, and tasks of one model share its trace and layer prices. Each finished
run is kept, and kept runs are not repeated.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from autoshard import Cluster
from autoshard.ir.execution import Execution
from passes.driver.pricing import priced_model
from passes.search.layers.price_model import CountedModel
from passes.search.recipe_plan import predict_recipe
from passes.search.recipe_problem import RecipeProblem
from passes.solver.search_control import Ceiling
from tests.benchmarks.decoder import Decoder, DecoderShape
from tests.benchmarks.published_runs import Row, cluster_of, model_shape, read_rows, recipe_of

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Priced:
    """A recipe in words, seconds of its step, and bytes of the fullest rank by kind."""

    words: str
    seconds: float
    memory: Mapping[str, int]

    @property
    def memory_bytes(self) -> int:
        """All bytes."""
        return sum(self.memory.values())


@dataclass(frozen=True, slots=True)
class Compared:
    """A published run beside the fastest recipe of its task (None if nothing was found in time)."""

    run: str
    source: str
    task: str
    device_bytes: int
    measured_s: float | None
    published: Priced
    found: Priced | None
    bound_s: float
    is_proven: bool
    search_s: float

    @property
    def ratio(self) -> float:
        """Found over published; infinite where nothing was found."""
        return math.inf if self.found is None else self.found.seconds / self.published.seconds

    @property
    def fits(self) -> bool:
        """Whether the published recipe fits in memory, by our count."""
        return self.published.memory_bytes <= self.device_bytes

    @property
    def holds(self) -> bool:
        """Whether the found recipe fits, with a price of at most the published recipe's if that fits too."""
        found_fits = self.found is not None and self.found.memory_bytes <= self.device_bytes
        return found_fits and (not self.fits or self.ratio <= 1.0)


def read_lines(path: Path) -> list[Compared]:
    """Read the kept lines of JSON; nothing where there is no file."""
    return [_read(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def _read(said: dict[str, Any]) -> Compared:
    known = {field.name: said[field.name] for field in fields(Compared)}
    found = said["found"]
    priced = {"published": Priced(**said["published"]), "found": None if found is None else Priced(**found)}
    return Compared(**{**known, **priced})


@dataclass(frozen=True, slots=True)
class Task:
    """A search's request: a model, a cluster, and fixed fields such as the global batch."""

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
    """Return the fields that no recipe chooses."""
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
    """Compare the runs of one task with the result of one search."""
    model, limit = counted(task.shape), task.cluster.device.memory_bytes
    search = RecipeProblem(model, task.cluster, task.base, limit)
    start = time.process_time()
    found = search.best(ceiling=Ceiling.within(seconds))
    spent_s = time.process_time() - start
    if found.was_interrupted:
        raise KeyboardInterrupt
    plan = None if found.recipe is None else priced(search, found.recipe)
    for row in rows:
        yield Compared(
            row["id"], source, task.name, limit, row["derived"]["step_time_s"], priced(search, recipe_of(row)), plan,
            found.lower_bound, found.is_complete, spent_s,
        )  # fmt: skip


def priced(search: RecipeProblem, recipe: Execution) -> Priced:
    """A recipe of a search with its price."""
    prediction = predict_recipe(search.counted, recipe, search.cluster)
    return Priced(recipe.words, prediction.step_time_s, prediction.memory_breakdown)


def usable_rows() -> list[Row]:
    """Return published runs that recipes describe: neither four bits, which have no price, nor adapters (LoRA)."""
    return [row for row in read_rows() if not row["dtype"].startswith("nvfp4") and row["task"] != "lora"]


def tasks_of(rows: Sequence[Row], every: int) -> list[tuple[str, Task, list[Row]]]:
    """Return rows by source and task: of each source every n-th task, with tasks of one model in sequence."""
    keyed = sorted(((row["source"]["key"], Task.of(row), row) for row in rows), key=lambda item: str(item[:2]))
    tasks = [
        (source, task, [row for *_, row in items])
        for (source, task), items in groupby(keyed, key=lambda item: item[:2])
    ]
    by_source = groupby(tasks, key=lambda item: item[0])
    return [task for _, items in by_source for task in list(items)[::every]]


def report(compared: Sequence[Compared]) -> str:
    """Return whether each run holds, then one line for each run, the lowest ratios first."""
    lines = [
        f"{sum(item.holds for item in compared)} of {len(compared)} plans fit and cost no more than the recipe.",
        "",
    ]
    lines += ["| run | recipe s | GiB | plan s | GiB | of | ratio | plan |", "|---|---|---|---|---|---|---|---|"]
    for item in sorted(compared, key=lambda item: (item.ratio, item.run)):
        plan = Priced("nothing found", math.inf, {}) if item.found is None else item.found
        sizes = [f"{priced.seconds:.4g} | {priced.memory_bytes / GIB:.1f}" for priced in (item.published, plan)]
        size = f"{item.device_bytes / GIB:.0f}"
        lines.append(f"| {item.run} | {sizes[0]} | {sizes[1]} | {size} | {item.ratio:.3f} | {plan.words} |")
    return "\n".join(lines)


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
            kept.writelines(json.dumps(asdict(item)) + "\n" for item in compare(task, source, left, options.seconds))
    compared = read_lines(options.out)
    sys.stdout.write(report(compared) + "\n")
    return int(not all(item.holds for item in compared))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
