"""How long it takes to price one plan of an 80-layer model on 1,024 devices, by schedule of its pipeline.

Run: python -m tests.benchmarks.pricing_time [--repeats 7]   (half a minute; each row is printed when it is measured)

The model (of the shape of Llama-3 70B, on meta) is traced once, and one recipe priced. Then each price is of a recipe
with another micro-batch, so that nothing but the trace and its layouts is known of it:

* cold: the schedule, with so many stages and micro-batches, was not seen before;
* warm: it was, with other times.

Times are milliseconds of one thread's CPU, the median and the largest of the repeats. Objects alive after the trace are
left out of garbage collections (`gc.freeze`): torch's own objects take longer to look through than a price to make.
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import torch
import transformers
from rich.console import Console
from torch import nn

from autoshard import Cluster
from autoshard.ir.execution import Execution
from autoshard.ir.runtime import Runtime
from cost_models.schedule_graph import schedule_graph
from passes.driver.pricing import price_execution
from tests.zoo.processes import quiet

CLUSTER = Cluster("h100_sxm", 128, 8)
SHAPES = (
    (None, 1, 1),
    ("GPipe", 1, 128), ("1F1B", 1, 128), ("1F1B", 1, 512),
    ("Interleaved1F1B", 5, 64), ("Interleaved1F1B", 5, 128), ("Interleaved1F1B", 5, 512),
    ("InterleavedZeroBubble", 1, 128), ("InterleavedZeroBubble", 5, 64),
    ("InterleavedZeroBubble", 5, 128), ("InterleavedZeroBubble", 5, 512),
    ("ZBVZeroBubble", 2, 128), ("ZBVZeroBubble", 2, 512), ("DualPipeV", 2, 128), ("DualPipeV", 2, 512),
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
        recipe = Execution(
            data=data, tensor=8, sequence_parallel=True, pipeline=pipeline, schedule=schedule, virtual_stages=virtual,
            micro_batch=size, global_batch=size * data * number, zero=1,
            runtime=Runtime(name="mine", overlap_pipeline=overlaps),
        )  # fmt: skip
        gc.collect()
        start = time.process_time()
        price_execution(model, CLUSTER, recipe, inputs)
        return 1e3 * (time.process_time() - start)

    cold, warm = [], []
    for _ in range(repeats):
        schedule_graph.cache_clear()
        cold.append(price())
        warm.append(price())
    return Times(schedule, pipeline, virtual, number, overlaps, cold, warm)


_COLUMNS = (
    "        schedule", "ranks", "virtual", "micro-batches", "sends overlap", "cold", "largest", "warm", "largest",
)  # fmt: skip


def line(cells: Sequence[str]) -> str:
    """A line of a Markdown table."""
    return "| " + " | ".join(f"{cell:>{len(name)}}" for cell, name in zip(cells, _COLUMNS, strict=True)) + " |"


def cells(row: Times) -> list[str]:
    """The cells of a shape's row."""
    milliseconds = [f"{choose(times):.1f}" for times in (row.cold, row.warm) for choose in (statistics.median, max)]
    shape = [row.schedule or "none", str(row.stages), str(row.virtual_stages), str(row.micro_batches)]
    return [*shape, "yes" if row.overlaps else "no", *milliseconds]


def main(arguments: list[str]) -> None:
    """Print the table, a line whenever a shape is measured; what is under way goes to the terminal beside it."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.pricing_time")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args(arguments)
    quiet()
    torch.set_num_threads(1)
    console = Console(width=120, highlight=False)
    with Console(stderr=True).status("tracing 80 layers") as status:
        model, inputs = build()
        first = Execution(data=128, tensor=8, sequence_parallel=True, zero=1)
        price_execution(model, CLUSTER, first, inputs)
        gc.collect()
        gc.freeze()
        versions = f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}"
        console.print(f"CPU milliseconds to price one plan of 80 layers on 1,024 devices ({versions})\n")
        console.print(line(_COLUMNS))
        console.print(line(["-" * len(name) for name in _COLUMNS]))
        shapes = [(shape, overlaps) for shape in SHAPES for overlaps in ((False, True) if shape[0] else (False,))]
        sizes = count(2)
        for number, (shape, overlaps) in enumerate(shapes):
            status.update(f"{number + 1} of {len(shapes)}: {shape[0] or 'no pipeline'}")
            console.print(line(cells(time_shape(model, inputs, shape, overlaps, sizes, options.repeats))))


if __name__ == "__main__":
    main(sys.argv[1:])
