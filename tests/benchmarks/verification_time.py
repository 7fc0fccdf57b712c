"""Time of a proof beside the compile that contains the proof.

Run: python -m tests.benchmarks.verification_time [--models gpt2 t5 ...] [--search-seconds 5] [--large] [--layers 126]

Models of the zoo are compiled on two axes. The table shows every stage, and the share of verification (preparation,
program, phases). `--large` compiles Llama-3 405B (Dubey et al. 2024, table 3) in bfloat16 for 8,192 ranks, 1,024 of
data by 8 of model. Its layout is written by hand: parameters over both axes, activations over the batch. One text
serves all ranks, so its length does not grow with ranks. Times are CPU seconds of one thread, so that other work on the
machine counts little. Memory is the largest resident set of the process so far.
"""

from __future__ import annotations

import argparse
import resource
import sys

import torch
from rich.console import Console
from rich.table import Table

from autoshard import Cluster, Mesh
from autoshard.cluster import local_cluster
from autoshard.ir.lowered import PhasedProgram
from autoshard.ir.program import Program
from autoshard.tracing import trace
from passes.driver.plan_and_lower import plan_program
from passes.driver.plan_options import PlanOptions
from passes.lowering.lower_program import lower_program, prepare
from passes.memory.liveness import find_lifetimes
from passes.planning.build_assignment import build_problem
from passes.solver.search_control import SearchControl
from passes.strategies.enumerate_strategies import EnumerateStrategies
from passes.strategies.fold_blocks import fold_blocks
from passes.strategies.price import Prices
from passes.verification.verify_phases import verify_phases
from passes.verification.verify_preparation import verify_preparation
from passes.verification.verify_program import verify_program
from tests.benchmarks.planning_time import Times
from tests.models import build
from tests.passes.layouts import LAYOUTS, plan_under
from tests.zoo.processes import quiet
from tests.zoo.table import ARCHITECTURES

MODELS = ("gpt2", "llama", "mixtral", "bert", "vit", "t5")
SMALL, LARGE = Mesh({"data": 2, "model": 2}), Mesh({"data": 1024, "model": 8})
PROVEN = ("verify preparation", "verify program", "verify phases")


def time_compile(name: str, search_s: float) -> Times:
    """All stages of `autoshard.compile` for a model of the zoo."""
    times = Times(name)
    model, inputs = ARCHITECTURES[name].build()
    with times.stage("trace"):
        program = trace(model, (), inputs)
    with times.stage("plan"):
        plan = plan_program(program, SMALL, local_cluster(SMALL), PlanOptions(control=SearchControl.within(search_s)))
    with times.stage("lower"):
        phased = lower_program(program, plan)
    time_proofs(times, program, phased)
    return times


def time_proofs(times: Times, program: Program, phased: PhasedProgram) -> None:
    """The three proofs of a compile."""
    times.nodes = len(phased.lowered.graph_module.graph.nodes)
    with times.stage("verify preparation"):
        verify_preparation(program, phased.lowered.traced)
    with times.stage("verify program"):
        verify_program(phased.lowered.traced, phased.lowered)
    with times.stage("verify phases"):
        verify_phases(phased)


def trace_405b(layers: int) -> Program:
    """The joint program of Llama-3 405B, or of its first layers, on meta."""
    sizes = {"words": 128256, "width": 16384, "inner": 53248, "heads": 128, "key_heads": 8, "length": 8192}
    with torch.device("meta"):
        model = build("llama", layers=layers, **sizes).bfloat16()
        tokens = torch.zeros(2048, 8192, dtype=torch.int64)
    return trace(model, (), {"input_ids": tokens, "labels": tokens, "use_cache": False})


def time_large(layers: int, console: Console) -> Times:
    """Trace, lower and prove Llama-3 405B for 8,192 ranks; the plan is given, not searched for."""
    times = Times(f"Llama-3 405B, {layers} layers, {LARGE.size:,} ranks")
    with times.stage("trace"):
        program = trace_405b(layers)
    console.print(f"traced: {len(program.graph.nodes):,} nodes, {times.seconds['trace']:.1f} s")
    with times.stage("plan"):
        space = EnumerateStrategies(LARGE)(prepare(program))
        prices = Prices(Cluster("h100_sxm", nodes=1024, devices_per_node=8), LARGE)
        planning = build_problem(space, prices, find_lifetimes(space, 0.0), fold_blocks(space))
        plan = plan_under(LAYOUTS["two axes"], planning)
    console.print(f"laid out: {times.seconds['plan']:.1f} s")
    with times.stage("lower"):
        phased = lower_program(program, plan)
    console.print(f"lowered: {times.seconds['lower']:.1f} s, {_memory_gib():.1f} GiB")
    time_proofs(times, program, phased)
    return times


def _memory_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def table(rows: list[Times]) -> Table:
    """One line for each compile."""
    stages = list(dict.fromkeys(stage for row in rows for stage in row.seconds))
    found = Table("program", "lowered nodes", *stages, "verified in", "of the compile")
    for row in rows:
        proven = sum(row.seconds[stage] for stage in PROVEN)
        cells = [f"{row.seconds[stage]:.2f}" for stage in stages]
        share = proven / sum(row.seconds.values())
        found.add_row(row.name, f"{row.nodes:,}", *cells, f"{proven:.2f} s", f"{share:.1%}")
    return found


def main(arguments: list[str]) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.verification_time")
    parser.add_argument("--models", nargs="*", default=list(MODELS), help="names in tests/zoo/table.py")
    parser.add_argument("--search-seconds", type=float, default=5.0)
    parser.add_argument("--large", action="store_true", help="Llama-3 405B for 8,192 ranks too")
    parser.add_argument("--layers", type=int, default=126, help="of Llama-3 405B")
    options = parser.parse_args(arguments)
    quiet()
    torch.set_num_threads(1)
    console = Console(width=180)
    rows = [time_compile(name, options.search_seconds) for name in options.models]
    if options.large:
        rows.append(time_large(options.layers, console))
    console.print(table(rows))
    console.print(f"largest resident set: {_memory_gib():.1f} GiB")


if __name__ == "__main__":
    main(sys.argv[1:])
