"""Time from a module on meta to a plan of a training step (AdamW, bf16 mixed precision), up to 671B.

Run: python -m tests.benchmarks.deep_models [--models llama3-8b ...] [--backend triton] [--json]

Each model has a fixed mesh and a process of its own, so that its peak of memory is separate. Seconds are wall-clock
time on all cores.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

import torch
from rich.console import Console
from rich.table import Table

import autoshard
from autoshard import Cluster, Mesh
from tests.benchmarks.decoder import Decoder, DecoderShape, Experts, Latent

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Case:
    """A model on a mesh with 8 devices in each node, for `batch` sequences in a step."""

    shape: DecoderShape
    mesh: Mesh
    batch: int
    node: str = "h100_sxm"


def _llama(layers: int, hidden: int, heads: int, ffn: int) -> DecoderShape:
    return DecoderShape(
        layers=layers, hidden=hidden, heads=heads, kv_heads=8, head_size=128, ffn=ffn, gated=True, vocab=128256,
        sequence=8192, tied=False, learned_positions=False, norm_bias=False, bias=False, dropout=0.0,
        fused_attention=True,
    )  # fmt: skip


LLAMA_8B = _llama(32, 4096, 32, 14336)
DEEPSEEK_V3 = replace(
    _llama(61, 7168, 128, 18432), kv_heads=128, head_size=192, vocab=129280, sequence=4096,
    experts=Experts(count=256, active=8, ffn=2048, shared_ffn=2048, dense_layers=3),
    latent=Latent(q_rank=1536, kv_rank=512, nope_size=128, rope_size=64, value_size=128),
)  # fmt: skip

CASES: Mapping[str, Case] = {
    "llama3-8b": Case(LLAMA_8B, Mesh({"data": 8, "model": 8}), 64),
    "llama3-70b": Case(_llama(80, 8192, 64, 28672), Mesh({"data": 128, "model": 8}), 128),
    "llama3-405b": Case(_llama(126, 16384, 128, 53248), Mesh({"data": 1024, "model": 16}), 1024),
    "deepseek-v3": Case(DEEPSEEK_V3, Mesh({"data": 256, "model": 8}), 256, "b200"),
}


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds and bytes of planning, and the proven bound of the objective.

    Args:
        tracing_s: seconds from the module to its program.
        enumeration_s: seconds from the program to the search problem.
        search_s, search_cpu_s: seconds of the search with its known recipes, and processor seconds.
        total_s: all seconds up to the plan.
        cpu_s: all processor seconds, which other work on the machine changes less.
        peak_bytes: peak memory of the process.
    """

    name: str
    tracing_s: float
    enumeration_s: float
    search_s: float
    search_cpu_s: float
    total_s: float
    cpu_s: float
    peak_bytes: int
    objective_s: float
    gap: float
    plan_bytes: int


class _Stages(logging.Handler):
    """Collect the seconds of each stage, which the planner logs at its end, and processor seconds."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.seconds: dict[str, float] = {}
        self.processor: dict[str, float] = {}
        self.last = time.process_time()

    def emit(self, record: logging.LogRecord) -> None:
        found = re.match(r"(\w+) took ([\d.]+) s", record.getMessage())
        if found:
            now = time.process_time()
            self.seconds[found[1]] = self.seconds.get(found[1], 0.0) + float(found[2])
            self.processor[found[1]] = self.processor.get(found[1], 0.0) + now - self.last
            self.last = now


def measure(name: str, case: Case, backend: str = "auto") -> Measured:
    """Plan one case; `backend` is an argument of `autoshard.plan`."""
    with torch.device("meta"):
        model = Decoder(case.shape)
        tokens = torch.zeros(case.batch, case.shape.sequence, dtype=torch.int64)
    stages = _Stages()
    for logger in map(logging.getLogger, ("passes.driver.planner", "passes.driver.plan_and_lower")):
        logger.setLevel(logging.DEBUG)
        logger.addHandler(stages)
    start, start_cpu = time.perf_counter(), time.process_time()
    plan = autoshard.plan(
        model,
        Cluster(case.node, case.mesh.size // 8, 8).mesh(case.mesh),
        example_inputs=(tokens, tokens),
        optimizer="adamw",
        backend=backend,
    )
    total, cpu = time.perf_counter() - start, time.process_time() - start_cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert plan.gap is not None, "the search proves a bound"
    tracing, enumeration, search = (stages.seconds[stage] for stage in ("tracing", "enumeration", "search"))
    return Measured(
        name=name,
        tracing_s=tracing,
        enumeration_s=enumeration,
        search_s=search,
        search_cpu_s=stages.processor["search"],
        total_s=total,
        cpu_s=cpu,
        peak_bytes=peak,
        objective_s=plan.objective,
        gap=plan.gap,
        plan_bytes=plan.predicted.peak_memory_bytes,
    )


def table(rows: list[Measured], backend: str) -> Table:
    """The table of the measured cases, with a line for each."""
    stages = ("tracing s", "enumeration s", "search s", "total s", "CPU s")
    columns = ("model", *stages, "memory GiB", "gap %", "step s", "peak GiB")
    title = f"From a module on meta to a plan of a step with AdamW, bf16 mixed precision, backend={backend!r}"
    result = Table(*columns, title=title)
    for row in rows:
        seconds = (row.tracing_s, row.enumeration_s, row.search_s, row.total_s, row.cpu_s)
        sizes = (f"{row.peak_bytes / _GIB:.2f}", f"{100 * row.gap:.3f}", f"{row.objective_s:.4f}")
        result.add_row(row.name, *(f"{item:.2f}" for item in seconds), *sizes, f"{row.plan_bytes / _GIB:.1f}")
    return result


def measure_apart(name: str, backend: str) -> Measured:
    """Measure a case in a separate process."""
    options = ["--models", name, "--backend", backend, "--json"]
    command = [sys.executable, "-m", "tests.benchmarks.deep_models", *options]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return Measured(**json.loads(output.splitlines()[-1]))


def main(arguments: list[str]) -> None:
    """Print the table, or with `--json` one line for each case, measured in this process."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.deep_models")
    parser.add_argument("--models", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--backend", default="auto", help="as autoshard.plan takes it: triton, to predict with kernels")
    parser.add_argument("--json", action="store_true", help="measure in this process, and print JSON")
    options = parser.parse_args(arguments)
    if options.json:
        for name in options.models:
            sys.stdout.write(json.dumps(asdict(measure(name, CASES[name], options.backend))) + "\n")
    else:
        rows = [measure_apart(name, options.backend) for name in options.models]
        Console(width=140).print(table(rows, options.backend))


if __name__ == "__main__":
    main(sys.argv[1:])
