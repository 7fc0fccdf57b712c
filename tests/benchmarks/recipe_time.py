"""Time to find the recipe of large models, tracing included; also a table of `planning_time`.

Run: python -m tests.benchmarks.recipe_time [--tasks 'Llama-3 8B' ...] [--seconds 60] [--json]

Each task has a process of its own on one thread, so that its peak of memory is separate. Seconds begin with the module
on meta, without imports.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import nn

import autoshard
from autoshard import Cluster


def llama(hidden: int, ffn: int, layers: int, heads: int) -> nn.Module:
    """A Llama 3 of these sizes."""
    config = transformers.LlamaConfig(
        vocab_size=128256, hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=8,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@dataclass(frozen=True, slots=True)
class Task:
    """A planning task: a model, the tokens of a sequence, the number of nodes of eight H100s, and the sequences of
    a step."""

    build: Callable[[], nn.Module]
    tokens: int
    nodes: int
    batch: int

    @property
    def cluster(self) -> Cluster:
        """The nodes of the task."""
        return Cluster("h100_sxm", self.nodes, 8)


TASKS = {
    "Llama-3 8B": Task(lambda: llama(4096, 14336, 32, 32), 8192, 8, 512),
    "Llama-3 70B": Task(lambda: llama(8192, 28672, 80, 64), 8192, 128, 2048),
    "Llama-3 405B": Task(lambda: llama(16384, 53248, 126, 128), 8192, 2048, 2048),
    "DeepSeek-V3 671B": Task(
        lambda: transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config()), 4096, 256, 7680
    ),
}


@dataclass(frozen=True, slots=True)
class Timed:
    """Time and result of planning a task."""

    name: str
    devices: int
    cpu_s: float
    wall_s: float
    search_wall_s: float
    memory_gib: float
    step_s: float
    gap: float
    words: str


def time_task(name: str, task: Task, budget_s: float) -> Timed:
    """Plan a task, and measure time and memory."""
    cluster = task.cluster
    wall, cpu = time.monotonic(), time.process_time()
    with torch.device("meta"):
        model = task.build().bfloat16()
        tokens = torch.zeros(1, task.tokens, dtype=torch.int64)
    inputs = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    plan = autoshard.plan(
        model, cluster, example_inputs=inputs, optimizer="adamw", global_batch=task.batch, time_budget_s=budget_s,
        runtime="megatron",
    )  # fmt: skip
    assert plan.recipe is not None
    assert plan.gap is not None
    return Timed(
        name=name,
        devices=cluster.size,
        cpu_s=time.process_time() - cpu,
        wall_s=time.monotonic() - wall,
        search_wall_s=plan.search_time_s,
        memory_gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        step_s=plan.objective,
        gap=plan.gap,
        words=plan.recipe.words,
    )


def recipe_table(rows: Sequence[Timed]) -> Table:
    """A table with a line for each task."""
    names = ("model", "devices", "CPU s", "wall s", "of it search", "GiB", "step s", "gap", "recipe")
    result = Table(*names, title="Planning over recipes, from a module on meta to a plan")
    for row in rows:
        times = (row.cpu_s, row.wall_s, row.search_wall_s)
        result.add_row(
            row.name, f"{row.devices:,}", *(f"{seconds:.1f}" for seconds in times), f"{row.memory_gib:.2f}",
            f"{row.step_s:.4g}", f"{row.gap:.2%}", row.words,
        )  # fmt: skip
    return result


def time_apart(name: str, budget_s: float) -> Timed:
    """Measure a task in a separate process."""
    options = ["--tasks", name, "--seconds", str(budget_s), "--json"]
    command = [sys.executable, "-m", "tests.benchmarks.recipe_time", *options]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return Timed(**json.loads(output.splitlines()[-1]))


def main(arguments: list[str]) -> None:
    """Print the table, or with `--json` one line for each task, planned in this process."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.recipe_time")
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--seconds", type=float, default=60.0, help="for each search")
    parser.add_argument("--json", action="store_true", help="plan in this process, and print JSON")
    options = parser.parse_args(arguments)
    if not options.json:
        rows = [time_apart(name, options.seconds) for name in options.tasks]
        Console(width=180).print(recipe_table(rows))
        return
    torch.set_num_threads(1)
    for name in options.tasks:
        sys.stdout.write(json.dumps(asdict(time_task(name, TASKS[name], options.seconds))) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
