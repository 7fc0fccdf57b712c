"""Predicted beside measured: step time and peak memory of plans that run on this machine's cores, over Gloo.

    python -m tests.benchmarks.local_plans            both models on 2 and on 4 ranks, about ten minutes
    python -m tests.benchmarks.local_plans --save     and write tests/benchmarks/results/local_plans.json

1. The ranks measure the machine together (`cost_models.calibration`), once for each number of ranks.
2. Each plan (layouts that experts write by hand, and the planner's choice) is priced for what was measured.
3. All plans run in turns, round after round, so that what else the machine does falls on all of them alike. A step is
   forward and backward; its time is the slowest rank's; of the rounds, the median counts.

Targets: rank correlation at least 0.9, mean absolute error at most 15 %, the fastest plan among the predicted three
fastest; predicted peak memory within 5 % of what is measured (`tests.benchmarks.live_memory`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import autoshard
from autoshard import Mesh, P, PartitionSpec
from cost_models.calibration import calibrate
from tests.benchmarks.live_memory import peak_bytes_of

ROUNDS = 7
RESULTS = Path(__file__).parent / "results" / "local_plans.json"

Layout = Mapping[str, PartitionSpec]
Model = Callable[[], tuple[nn.Module, dict[str, torch.Tensor]]]


@dataclass(frozen=True, slots=True)
class Row:
    """One plan: predicted and measured seconds per step and bytes per rank."""

    model: str
    mesh: str
    layout: str
    predicted_s: float
    measured_s: float
    predicted_bytes: int
    measured_bytes: int


def gpt() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """GPT-2 of 3 layers, width 192."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=1024, n_positions=128, n_embd=192, n_layer=3, n_head=4, use_cache=False, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return GPT2LMHeadModel(config), _tokens(1024)


def llama() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Llama of 3 layers, width 192, with grouped queries."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1024, hidden_size=192, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config), _tokens(1024)


def _tokens(vocabulary: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, vocabulary, (8, 128), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens}


MODELS: dict[str, Model] = {"gpt": gpt, "llama": llama}

_TENSOR: dict[str, Callable[[str], Layout]] = {
    "gpt": lambda axis: {
        "transformer.h.*.attn.c_attn.weight": P(None, axis),
        "transformer.h.*.attn.c_proj.weight": P(axis),
        "transformer.h.*.mlp.c_fc.weight": P(None, axis),
        "transformer.h.*.mlp.c_proj.weight": P(axis),
    },
    "llama": lambda axis: {
        "model.layers.*.self_attn.[qkv]_proj.weight": P(axis),
        "model.layers.*.self_attn.o_proj.weight": P(None, axis),
        "model.layers.*.mlp.gate_proj.weight": P(axis),
        "model.layers.*.mlp.up_proj.weight": P(axis),
        "model.layers.*.mlp.down_proj.weight": P(None, axis),
    },
}
_TABLES = {"gpt": "transformer.wte.weight", "llama": "lm_head.weight"}
_WEIGHTS = {"gpt": "transformer.h.*.c_*.weight", "llama": "model.layers.*_proj.weight"}


def layouts(model: str, ranks: int) -> list[tuple[Mesh, str, Layout]]:
    """Meshes with the layouts that are run on them."""
    tensor, table, weights = _TENSOR[model], _TABLES[model], _WEIGHTS[model]
    line, whole = Mesh({"x": ranks}), {"*.weight": P(), "*.bias": P()}
    found: list[tuple[Mesh, str, Layout]] = [
        (line, "chosen", {}),
        (line, "data", {"input:*": P("x"), **whole}),
        (line, "fully sharded", {"input:*": P("x"), weights: P("x"), table: P("x")}),
        (line, "tensor", {"input:*": P(), **tensor("x")}),
        (line, "tensor and vocabulary", {"input:*": P(), **tensor("x"), table: P("x")}),
        (line, "whole", {"input:*": P(), **whole}),
    ]
    if ranks == 4:
        square = Mesh({"x": 2, "y": 2})
        found += [
            (square, "data and tensor", {"input:*": P("x"), **tensor("y")}),
            (square, "data, tensor and vocabulary", {"input:*": P("x"), **tensor("y"), table: P("y")}),
            (square, "hybrid sharded", {"input:*": P(("x", "y")), weights: P("y"), table: P("y")}),
        ]
    return found


@dataclass(slots=True)
class _Run:
    """A compiled plan and the times of its steps."""

    row: dict[str, Any]
    step: Callable[[], None]
    held: list[torch.Tensor]
    times_s: list[float]


def measure(models: tuple[str, ...], budget_s: float) -> list[dict[str, Any]]:
    """Run on every rank: rows of all plans, the same on each."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    calibration = calibrate(budget_s=budget_s)
    runs = [
        _compile(name, mesh, layout, constraints, autoshard.Cluster(calibration.cluster.node))
        for name in models
        for mesh, layout, constraints in layouts(name, dist.get_world_size())
    ]
    for run in runs:
        run.step()
        run.row["measured_bytes"] = _maximum(peak_bytes_of(run.step, run.held))
    for _ in range(ROUNDS):
        for run in runs:
            run.step()
            run.times_s.append(_time_of(run.step))
    rows = [{**run.row, "measured_s": statistics.median(run.times_s)} for run in runs]
    dist.destroy_process_group()
    return rows


def _compile(name: str, mesh: Mesh, layout: str, constraints: Layout, cluster: autoshard.Cluster) -> _Run:
    model, inputs = MODELS[name]()
    plans = [None]
    if dist.get_rank() == 0:
        plans = [autoshard.plan(model, cluster, mesh=mesh, example_inputs=inputs, constraints=constraints)]
    dist.broadcast_object_list(plans)
    plan = plans[0]
    assert plan is not None
    sharded = autoshard.compile(model, mesh, example_inputs=inputs, plan=plan)
    assert isinstance(sharded, autoshard.ShardedModule)

    def step() -> None:
        sharded.zero_grad(set_to_none=True)
        sharded(**inputs)["loss"].backward()

    predicted = plan.predicted
    row = {
        "model": name,
        "mesh": str(mesh),
        "layout": layout,
        "predicted_s": predicted.step_time_s,
        "predicted_bytes": predicted.peak_memory_bytes,
    }
    held = [*sharded.parameters(), *sharded.buffers(), *inputs.values()]
    return _Run(row, step, held, [])


def _time_of(step: Callable[[], None]) -> float:
    """Seconds of one step on the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    step()
    return _maximum(time.perf_counter() - start)


def _maximum(value: float) -> Any:
    """The largest over the ranks, in the type of `value`."""
    found = torch.tensor(value)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def run_on(ranks: int, models: tuple[str, ...], budget_s: float = 20.0) -> list[Row]:
    """The rows of all plans on so many local processes."""
    os.environ["OMP_NUM_THREADS"] = "1"
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=ranks, rdzv_backend="c10d", rdzv_endpoint="localhost:0"
    )
    found = elastic_launch(config, measure)(models, budget_s)
    return [Row(**row) for row in found[0]]


def summary(rows: list[Row]) -> dict[str, float]:
    """Rank correlation and errors over `rows`; the rank of the measured best among the predicted."""
    predicted, measured = [row.predicted_s for row in rows], [row.measured_s for row in rows]
    best = min(range(len(rows)), key=measured.__getitem__)
    return {
        "plans": len(rows),
        "spearman": float(np.corrcoef(_ranks(predicted), _ranks(measured))[0, 1]),
        "mape": statistics.mean(abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)),
        "bias": statistics.mean(p / m - 1 for p, m in zip(predicted, measured, strict=True)),
        "rank of the fastest": 1 + sum(value < predicted[best] for value in predicted),
        "worst error of memory": max(abs(row.predicted_bytes / row.measured_bytes - 1) for row in rows),
    }


def _ranks(values: list[float]) -> np.ndarray:
    return np.argsort(np.argsort(values))


def table_of(rows: list[Row]) -> Table:
    """All plans, predicted beside measured."""
    table = Table("model", "mesh", "layout", "predicted", "measured", "ratio", "memory", "measured", "ratio")
    for row in rows:
        table.add_row(
            row.model, row.mesh, row.layout, f"{row.predicted_s * 1e3:.1f} ms", f"{row.measured_s * 1e3:.1f} ms",
            f"{row.predicted_s / row.measured_s:.2f}", f"{row.predicted_bytes / 2**20:.2f} MiB",
            f"{row.measured_bytes / 2**20:.2f} MiB", f"{row.predicted_bytes / row.measured_bytes:.3f}",
        )  # fmt: skip
    return table


def main() -> None:
    """Measure, print, and save if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    console, groups = Console(width=160), {}
    for ranks in options.ranks:
        rows = run_on(ranks, tuple(options.models))
        console.print(table_of(rows))
        for model in options.models:
            groups[f"{model} on {ranks} ranks"] = summary([row for row in rows if row.model == model])
        groups[f"all on {ranks} ranks"] = summary(rows)
        if options.save:
            _save(ranks, rows, groups)
    for name, figures in groups.items():
        console.print(name, {key: round(value, 3) for key, value in figures.items()})


def _save(ranks: int, rows: list[Row], groups: Mapping[str, Any]) -> None:
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    known[f"{ranks} ranks"] = [asdict(row) for row in rows]
    known |= {"summary": groups, "date": datetime.now(UTC).date().isoformat(), "torch": torch.__version__}
    known |= {"machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"}
    RESULTS.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
