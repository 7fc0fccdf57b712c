"""Time of a search for doubled layers: Llama-3 8B with 16, 32, 64 and 128 layers in turns.

Run: python -m tests.benchmarks.depth_time [--layers 16 32 64 128] [--turns 7]; also a table of `planning_time`.

Specs are searched for a step of 32 sequences on 8 x 8 B200, whose memory up to 64 layers do not fill. Recipes are
searched for a step of 512 sequences on 64 H100 and 64 B200. Memory binds from 32 layers on the former and from 64 on
the latter. Below, plain data parallelism with ZeRO-1 is at its bound, so the search is short. Each search has a process
of its own on one thread. Seconds are medians of the turns, by clock (on an idle machine) and by processor.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from rich.console import Console
from rich.table import Table

from autoshard import Cluster, Mesh
from passes.driver.pricing import priced_model
from passes.driver.recipe_search import base_recipe, problem_of
from tests.benchmarks import deep_models, recipe_time

LAYERS = (16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Seconds:
    """Time of a search, by a clock and of the processor."""

    clock: float
    processor: float


def _specs(layers: int) -> Seconds:
    """Time the search over specs of a model with so many layers."""
    shape = replace(deep_models.LLAMA_8B, layers=layers)
    case = deep_models.Case(shape, Mesh({"data": 8, "model": 8}), 32, "b200")
    measured = deep_models.measure(str(layers), case)
    return Seconds(measured.search_s, measured.search_cpu_s)


def _recipes(device: str, layers: int) -> Seconds:
    """Time the search over recipes, without tracing and counting."""
    with torch.device("meta"):
        model = recipe_time.llama(4096, 14336, layers, 32).bfloat16()
        tokens = torch.zeros(1, 8192, dtype=torch.int64)
    counted = priced_model(model, {"input_ids": tokens, "labels": tokens, "use_cache": False}, None).counted
    base = base_recipe(model, "adamw", None, 512)
    problem = problem_of(counted, Cluster(device, 8, 8), base, None, {})
    clock, processor = time.perf_counter(), time.process_time()
    problem.best_of_all()
    return Seconds(time.perf_counter() - clock, time.process_time() - processor)


SEARCHES: Mapping[str, Callable[[int], Seconds]] = {
    "specs": _specs,
    "recipes, H100": partial(_recipes, "h100_sxm"),
    "recipes, B200": partial(_recipes, "b200"),
}


def table(layers: Sequence[int], turns: int) -> Table:
    """Return seconds by search and depth, and the ratio of each depth to the previous depth."""
    result = Table("seconds", *(f"{depth} layers" for depth in layers), title="Seconds of searches, and over the last")
    for search in SEARCHES:
        rounds = [[_apart(search, depth) for depth in layers] for _ in range(turns)]
        by_depth = list(zip(*rounds, strict=True))
        result.add_row(f"{search}, clock", *_cells([[each.clock for each in turn] for turn in by_depth]))
        result.add_row(f"{search}, processor", *_cells([[each.processor for each in turn] for turn in by_depth]))
    return result


def _cells(by_depth: Sequence[Sequence[float]]) -> list[str]:
    """Return medians by depth, each with its ratio to the previous depth."""
    medians = [statistics.median(turns) for turns in by_depth]
    ratios = [f" ({after / before:.3f})" for before, after in pairwise(medians)]
    return [f"{seconds:.2f}{ratio}" for seconds, ratio in zip(medians, ["", *ratios], strict=True)]


def _apart(search: str, layers: int) -> Seconds:
    """Measure a search in a separate process."""
    command = [sys.executable, "-m", "tests.benchmarks.depth_time", "--one", search, "--layers", str(layers)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return Seconds(**json.loads(output.splitlines()[-1]))


def main(arguments: list[str]) -> None:
    """Print the table, or with `--one` the seconds of one search."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.depth_time")
    parser.add_argument("--layers", nargs="+", type=int, default=LAYERS)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--one", choices=SEARCHES, help="the search of the first of --layers, in this process")
    options = parser.parse_args(arguments)
    if options.one:
        torch.set_num_threads(1)
        sys.stdout.write(json.dumps(asdict(SEARCHES[options.one](options.layers[0]))) + "\n")
    else:
        Console(width=140).print(table(options.layers, options.turns))


if __name__ == "__main__":
    main(sys.argv[1:])
