"""Time of each stage of planning.

Run: python -m tests.benchmarks.planning_time [--models big_bird t5 ...] [--search-seconds 5] [--large]
    [--recipes 'Llama-3 8B' ...] [--recipe-seconds 60]
    [--backend triton] [--turns 7]

Models of the zoo with up to 3,000 nodes are planned on two axes, stage by stage. `--large` enumerates all strategies of
two programs of over 10,000 nodes on three axes. One program is a Llama. In the second program no two layers have equal
shapes, so no call repeats another call. Times are CPU seconds of one thread, so that other work on the machine counts
little.

The deep models of `tests.benchmarks.deep_models` follow, whose specs are searched on a mesh. Then come the models of
`tests.benchmarks.recipe_time`, whose recipes are searched. Any list may be empty. The cost of doubled layers comes last
(`tests.benchmarks.depth_time`), in `--turns` turns.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from autoshard import Mesh
from autoshard.cluster import local_cluster
from autoshard.ir.program import Program
from autoshard.tracing import trace
from passes.driver.plan_of_choice import lowered_plan
from passes.driver.plan_options import PlanOptions
from passes.lowering.lower_program import lower_program, prepare
from passes.memory.liveness import find_lifetimes
from passes.planning.build_assignment import PlanningProblem, build_problem
from passes.planning.search import Search
from passes.solver.search_control import SearchControl
from passes.strategies.enumerate_strategies import EnumerateStrategies, SearchSpace
from passes.strategies.fold_blocks import fold_blocks
from passes.strategies.price import Prices
from passes.verification.verify_phases import verify_phases
from passes.verification.verify_program import verify_program
from tests.benchmarks import deep_models, depth_time
from tests.benchmarks.recipe_time import TASKS, recipe_table, time_apart
from tests.zoo.processes import quiet
from tests.zoo.table import ARCHITECTURES

MODELS = ("t5", "bart", "big_bird", "led", "prophetnet", "qwen3_next")
TWO_AXES = Mesh({"data": 2, "model": 2})
THREE_AXES = Mesh({"data": 2, "model": 2, "expert": 2})


@dataclass(slots=True)
class Times:
    """CPU seconds by stage, and sizes of the problem and the plan."""

    name: str
    seconds: dict[str, float] = field(default_factory=dict)
    nodes: int = 0
    strategies: int = 0
    classes: int = 0
    pairs: int = 0
    objective: float = 0.0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the code within this context as a stage."""
        gc.collect()
        start = time.process_time()
        yield
        self.seconds[name] = time.process_time() - start


def time_stages(name: str, make: Callable[[], tuple[nn.Module, dict[str, Any]]], mesh: Mesh, search_s: float) -> Times:
    """Time all stages of one model; the search takes at most `search_s` seconds."""
    times = Times(name)
    model, inputs = make()
    with times.stage("trace"):
        program = trace(model, (), inputs, all_tangents=True)
    planning = time_problem(times, program, mesh)
    with times.stage("search"):
        solution = Search(None, control=SearchControl.within(search_s))(planning)
    times.objective = solution.cost
    cluster = local_cluster(mesh)
    with times.stage("plan"):
        plan = lowered_plan(
            planning, solution.choice, solution.cost, solution.lower_bound, cluster, PlanOptions(with_baselines=False)
        ).plan
    with times.stage("lower"):
        phased = lower_program(program, plan, cluster)
    with times.stage("verify"):
        verify_program(phased.lowered.traced, phased.lowered)
        verify_phases(phased)
    return times


def time_problem(times: Times, program: Program, mesh: Mesh) -> PlanningProblem:
    """Run and time the stages from a traced program to the search problem."""
    space = time_enumeration(times, program, mesh)
    with times.stage("fold"):
        representatives = fold_blocks(space)
    with times.stage("price"):
        planning = build_problem(space, Prices(local_cluster(mesh), mesh), find_lifetimes(space, 0.0), representatives)
    times.classes = len(planning.members)
    times.pairs = sum(edge.cost.size for edge in planning.assignment.edges)
    return planning


def time_enumeration(times: Times, program: Program, mesh: Mesh) -> SearchSpace:
    """Run and time the stages from a traced program to the strategies of its nodes."""
    with times.stage("prepare"):
        prepared = prepare(program)
    times.nodes = len(prepared.graph.nodes)
    with times.stage("enumerate"):
        space = EnumerateStrategies(mesh)(prepared)
    times.strategies = sum(len(site.strategies) for site in space.sites.values())
    return space


class Uneven(nn.Module):
    """Layers with products as in attention, each with another width."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        widths = [64 + 16 * index for index in range(layers + 1)]
        self.norms = nn.ModuleList(nn.LayerNorm(width) for width in widths[:-1])
        self.mixes = nn.ModuleList(nn.Linear(width, width) for width in widths[:-1])
        self.steps = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        """The mean square of the last layer's output; `x` is [batch, length, 64]."""
        for norm, mix, step in zip(self.norms, self.mixes, self.steps, strict=True):
            heads = mix(norm(x)).unflatten(-1, (8, -1)).transpose(1, 2)
            weights = torch.softmax(heads @ heads.transpose(-1, -2) / heads.shape[-1], dim=-1)
            mixed = (weights @ heads).transpose(1, 2).flatten(2)
            x = step(x + nn.functional.gelu(mixed) * torch.sigmoid(x))
        return x.square().mean()


def trace_uneven(layers: int) -> Program:
    """The traced program of `Uneven`, with about 78 nodes for each layer."""
    with torch.device("meta"):
        return trace(Uneven(layers), (torch.zeros(16, 64, 64),), {})


def trace_llama(layers: int) -> Program:
    """The traced program of a Llama, with about 210 nodes for each layer."""
    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=8,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
        tokens = torch.zeros(16, 512, dtype=torch.int64)
    return trace(model, (), {"input_ids": tokens, "labels": tokens, "use_cache": False})


def table(title: str, rows: list[Times]) -> Table:
    """A table with a line for each program."""
    stages = list(dict.fromkeys(stage for row in rows for stage in row.seconds))
    result = Table("program", "nodes", "strategies", "variables", "pairs", *stages, "sum", "objective s", title=title)
    for row in rows:
        counts = (row.nodes, row.strategies, row.classes, row.pairs)
        result.add_row(
            row.name,
            *(f"{count:,}" if count else "" for count in counts),
            *(f"{row.seconds[stage]:.2f}" if stage in row.seconds else "" for stage in stages),
            f"{sum(row.seconds.values()):.1f}",
            f"{row.objective:.6g}" if row.objective else "",
        )
    return result


def time_large(llama_layers: int, uneven_layers: int) -> list[Times]:
    """Time tracing, preparation and enumeration of two programs with over 10,000 nodes."""
    rows = []
    for name, make, layers in (("llama", trace_llama, llama_layers), ("all distinct", trace_uneven, uneven_layers)):
        times = Times(f"{name}, {layers} layers")
        with times.stage("trace"):
            program = make(layers)
        time_enumeration(times, program, THREE_AXES)
        rows.append(times)
    return rows


def main(arguments: list[str]) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.planning_time")
    parser.add_argument("--models", nargs="*", default=list(MODELS), help="names in tests/zoo/table.py")
    parser.add_argument("--search-seconds", type=float, default=5.0)
    parser.add_argument("--large", action="store_true", help="the programs of 10,000 nodes too")
    parser.add_argument("--layers", nargs=2, type=int, default=[40, 84], help="of the two large programs")
    parser.add_argument("--deep", nargs="*", default=list(deep_models.CASES), help="of tests.benchmarks.deep_models")
    parser.add_argument("--recipes", nargs="*", default=list(TASKS), help="of tests.benchmarks.recipe_time")
    parser.add_argument("--recipe-seconds", type=float, default=60.0, help="for each search over recipes")
    parser.add_argument("--backend", default="auto", help="of the deep models: triton, to predict with kernels")
    parser.add_argument("--turns", type=int, default=7, help="of tests.benchmarks.depth_time; 0: none")
    options = parser.parse_args(arguments)
    quiet()
    console = Console(width=180)
    rows = [time_stages(name, ARCHITECTURES[name].build, TWO_AXES, options.search_seconds) for name in options.models]
    if rows:
        console.print(table(f"Seconds on {TWO_AXES}", rows))
    if options.deep:
        deep = [deep_models.measure_apart(name, options.backend) for name in options.deep]
        console.print(deep_models.table(deep, options.backend))
    if options.large:
        console.print(table(f"Seconds on {THREE_AXES}", time_large(*options.layers)))
    if options.recipes:
        recipes = [time_apart(name, options.recipe_seconds) for name in options.recipes]
        console.print(recipe_table(recipes))
    if options.turns:
        console.print(depth_time.table(depth_time.LAYERS, options.turns))


if __name__ == "__main__":
    main(sys.argv[1:])
