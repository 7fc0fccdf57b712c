"""How long it takes to price one plan of an 80-layer model on 1,024 devices, by schedule of its pipeline.

Run: python -m tests.benchmarks.pricing_time [--repeats 7]

The model (of the shape of Llama-3 70B, on meta) is traced once, and one recipe priced. Then each price is of a recipe
with another micro-batch, so that nothing but the trace and its layouts is known of it:

* cold: the schedule, with so many stages and micro-batches, was not seen before;
* warm: it was, with other times.

Times are milliseconds of one thread's CPU, the median and the largest of the repeats.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import nn

import autoshard
from autoshard import Cluster, Recipe
from cost_models.schedule_graph import schedule_graph
from tests.zoo.processes import quiet

CLUSTER = Cluster("h100_sxm", 128, 8)
SHAPES = (
    (None, 1, 1),
    ("gpipe", 1, 128), ("1f1b", 1, 128), ("1f1b", 1, 512),
    ("interleaved-1f1b", 5, 64), ("interleaved-1f1b", 5, 128), ("interleaved-1f1b", 5, 512),
    ("zero-bubble", 1, 128), ("zero-bubble", 5, 64), ("zero-bubble", 5, 128), ("zero-bubble", 5, 512),
    ("zbv", 2, 128), ("zbv", 2, 512), ("dualpipev", 2, 128), ("dualpipev", 2, 512),
)  # fmt: skip
"""Schedule, virtual stages, micro-batches."""


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds of each price of a shape."""

    schedule: str | None
    stages: int
    virtual_stages: int
    micro_batches: int
    overlaps: bool
    cold: list[float]
    warm: list[float]


def build() -> tuple[nn.Module, dict[str, object]]:
    """The model and its inputs, on meta."""
    config = transformers.LlamaConfig(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).bfloat16()
        tokens = torch.zeros(1, 8192, dtype=torch.int64)
    return model, {"input_ids": tokens, "labels": tokens, "use_cache": False}


def time_shape(
    model: nn.Module,
    inputs: dict[str, object],
    shape: tuple[str | None, int, int],
    overlaps: bool,
    micro_batches: Iterator[int],
    repeats: int,
) -> Times:
    """Price recipes of a shape; `micro_batches` gives sizes that were not priced before."""
    schedule, virtual, number = shape
    pipeline = 1 if schedule is None else 16
    data = CLUSTER.size // 8 // pipeline

    def price() -> float:
        size = next(micro_batches)
        recipe = Recipe(
            data=data, tensor=8, sequence_parallel=True, pipeline=pipeline, schedule=schedule, virtual_stages=virtual,
            micro_batch=size, global_batch=size * data * number, zero=1, overlap_pipeline=overlaps,
        )  # fmt: skip
        gc.collect()
        start = time.process_time()
        autoshard.price(model, CLUSTER, recipe, example_inputs=inputs)
        return 1e3 * (time.process_time() - start)

    cold, warm = [], []
    for _ in range(repeats):
        schedule_graph.cache_clear()
        cold.append(price())
        warm.append(price())
    return Times(schedule, pipeline, virtual, number, overlaps, cold, warm)


def table(rows: list[Times]) -> Table:
    """One line for each shape."""
    names = ("schedule", "ranks", "virtual", "micro-batches", "sends overlap", "cold", "largest", "warm", "largest")
    result = Table(*names, title="CPU milliseconds to price one plan of 80 layers on 1,024 devices")
    for row in rows:
        result.add_row(
            row.schedule or "none", str(row.stages), str(row.virtual_stages), str(row.micro_batches),
            "yes" if row.overlaps else "no",
            *(f"{choose(times):.1f}" for times in (row.cold, row.warm) for choose in (statistics.median, max)),
        )  # fmt: skip
    return result


def main(arguments: list[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.pricing_time")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args(arguments)
    quiet()
    torch.set_num_threads(1)
    model, inputs = build()
    autoshard.price(model, CLUSTER, Recipe(data=128, tensor=8, sequence_parallel=True, zero=1), example_inputs=inputs)
    sizes = count(2)
    rows = [
        time_shape(model, inputs, shape, overlaps, sizes, options.repeats)
        for shape in SHAPES
        for overlaps in ((False, True) if shape[0] else (False,))
    ]
    Console(width=120).print(table(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
