"""Predicted and measured steps of the plans of `plan(global_batch=)` on eight tiny clusters of slow links.

    python -m tests.benchmarks.tiny_clusters [--only "NAME" ...] [--steps 9] [--markdown FILE]

Devices are cores of this machine, as measured by `calibrate`. Links are links of `autoshard.testing.delayed_mesh`. The
batch is the only constraint of a plan. Time is the work of a rank's thread on its core, plus its waits for links and
other ranks (`ThreadClock`). Four ranks may therefore share two cores, and other processes the machine. A step is
forward, backward and AdamW, by the slowest rank, in the median of the steps.

The target is a mean absolute error of 10 %, with data, tensor, context, expert and pipeline parallelism each chosen
somewhere.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import autoshard
from autoshard import Cluster, Mesh
from autoshard.calibration import calibrate, semantic_samples
from autoshard.cli.calibrate import keep_freed_memory
from autoshard.testing import Link, delayed_mesh
from cost_models import topology
from cost_models.calibration import Calibration, pooled
from cost_models.device import Device
from cost_models.hardware import NodeType
from tests.benchmarks.races import commit, date, versions

VOCABULARY = 1024
WARM_UP = 3
Built = tuple[nn.Module, dict[str, torch.Tensor]]


def _built(name: str, tokens: int, **sizes: int) -> Built:
    """A causal model of transformers, and one sequence as its inputs."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        hidden_size=256, num_attention_heads=8, num_key_value_heads=8, vocab_size=VOCABULARY,
        max_position_embeddings=tokens, use_cache=False, **sizes,
    )  # fmt: skip
    words = torch.randint(0, VOCABULARY, (1, tokens))
    model = getattr(transformers, f"{name}ForCausalLM")(config).train()
    return model, {"input_ids": words, "labels": words}


LLAMA = partial(_built, "Llama", 128, num_hidden_layers=8, intermediate_size=688)
LONG = partial(_built, "Llama", 2048, num_hidden_layers=2, intermediate_size=344)
MIXTRAL = partial(_built, "Mixtral", 128, num_hidden_layers=4, intermediate_size=512, num_local_experts=8)
FAST, SLOW, SLOWEST = Link(2e-4, 1e9), Link(1e-3, 5e7), Link(2e-3, 1e7)


class ThreadClock:
    """A clock of the seconds that this thread has worked or waited."""

    def __init__(self) -> None:
        self._waited_s = 0.0

    def now_s(self) -> float:
        """The seconds so far."""
        return time.thread_time() + self._waited_s

    def sleep(self, seconds: float) -> None:
        """Add `seconds` as waited."""
        self._waited_s += seconds


@dataclass(frozen=True)
class Tiny:
    """A model, and the links of its devices inside and between nodes.

    `batch` is in sequences.
    """

    build: Callable[[], Built]
    nodes: int
    devices: int
    intra: Link
    inter: Link
    batch: int = 16

    @property
    def ranks(self) -> int:
        """The number of ranks of the cluster."""
        return self.nodes * self.devices

    def cluster(self, device: Device) -> Cluster:
        """Return the cluster for the planner."""
        intra, inter = _priced(self.intra), _priced(self.inter)
        node = NodeType("tiny", device, self.devices, intra, inter)
        return Cluster(node, self.nodes, self.devices)

    def mesh(self, axes: Mesh, clock: ThreadClock) -> DeviceMesh:
        """The mesh of the processes. Ranks of one node are consecutive."""
        links = dict.fromkeys(axes.axis_names, self.inter)
        return delayed_mesh(dict(axes.axes), links, box=(self.devices, self.intra), clock=clock)


def _priced(link: Link) -> topology.Link:
    """The cost models' link for a link that delays messages."""
    return topology.Link(
        *(link.bandwidth_bytes_per_s, 1.0, 0.0),
        latency_s=0.0, start_s=link.latency_s, ramp_bytes=0.0, reduce_scatter_phases=1.0,
    )  # fmt: skip


TINY = {
    "two boxes": Tiny(LLAMA, 2, 1, FAST, FAST),
    "two boxes, slow link": Tiny(LLAMA, 2, 1, SLOWEST, SLOWEST),
    "two boxes of two": Tiny(LLAMA, 2, 2, FAST, SLOWEST),
    "four, long sequences": Tiny(LONG, 1, 4, FAST, FAST, batch=2),
    "two, one long sequence": Tiny(LONG, 1, 2, FAST, FAST, batch=1),
    "experts": Tiny(MIXTRAL, 1, 2, FAST, FAST),
    "experts, slow link": Tiny(MIXTRAL, 1, 2, SLOW, SLOW),
    "experts in two boxes of two": Tiny(MIXTRAL, 2, 2, FAST, SLOW),
}
WAYS = ("data", "tensor", "context", "expert", "pipeline")


@dataclass(frozen=True, slots=True)
class Row:
    """The predicted and measured seconds of a step for a cluster's plan, and the predicted seconds of its parts."""

    name: str
    plan: str
    predicted_s: float
    measured_s: float
    parts: Mapping[str, float]

    @property
    def ratio(self) -> float:
        """Predicted seconds divided by measured seconds."""
        return self.predicted_s / self.measured_s


def _measured(budget_s: float) -> Calibration:
    """Measure the machine with all ranks busy, by the processor time of their threads."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with patch("cost_models.calibration.time.perf_counter", time.thread_time):
        return calibrate(budget_s=budget_s)


def _trained(name: str, passed: Calibration, steps: int) -> tuple[Any, list[float]]:
    """On every rank, train with the plan of a cluster, and return the plan and the times of its steps."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    tiny, clock = TINY[name], ThreadClock()
    model, inputs = tiny.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    cluster, said = tiny.cluster(passed.cluster.device), [None]
    asked: dict[str, Any] = {"example_inputs": inputs, "precision": None, "optimizer": optimizer}
    if dist.get_rank() == 0:
        said = [autoshard.plan(model, cluster, global_batch=tiny.batch, **asked)]
    dist.broadcast_object_list(said)
    plan: Any = said[0]
    step = autoshard.compile(model, tiny.mesh(plan.mesh, clock), optimizer=optimizer, plan=plan)
    words = torch.randint(0, VOCABULARY, (tiny.batch, inputs["labels"].shape[1]))
    batch = dict.fromkeys(inputs, words)
    times_s = []
    for _ in range(WARM_UP + steps):
        start_s = _largest(clock.now_s())
        clock.sleep(start_s - clock.now_s())
        step(**batch)
        times_s.append(_largest(clock.now_s()) - start_s)
    return plan, times_s[WARM_UP:]


def _largest(value: float) -> float:
    """The largest value of all ranks."""
    found = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def _launch(ranks: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the function's result on the first of so many processes."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    return elastic_launch(config, function)(*arguments)[0]


def measure(name: str, steps: int) -> Row:
    """Calibrate, plan, train, and calibrate again. The plan is priced for the mean of both calibrations."""
    before = _launch(TINY[name].ranks, _measured, 10.0)
    plan, times_s = _launch(TINY[name].ranks, _trained, name, before, steps)
    after = _launch(TINY[name].ranks, _measured, 10.0)
    device = pooled([before, after], kernels=tuple(semantic_samples())).cluster.device
    model, inputs = TINY[name].build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    asked: dict[str, Any] = {"example_inputs": inputs, "precision": None, "optimizer": optimizer}
    cluster = TINY[name].cluster(device)
    predicted = autoshard.plan(model, cluster, global_batch=TINY[name].batch, recipe=plan.recipe, **asked).predicted
    return Row(name, _in_words(plan), predicted.step_time_s, statistics.median(times_s), predicted.breakdown)


def _in_words(plan: Any) -> str:
    recipe = plan.recipe
    ways = [f"{way} {getattr(recipe, way)}" for way in WAYS if (getattr(recipe, way) or 1) > 1]
    stages = [f"{recipe.schedule}, {recipe.virtual_stages} a rank"] * (recipe.pipeline > 1)
    return ", ".join([*ways, *stages, f"ZeRO-{recipe.zero or 0}", f"micro-batch {recipe.micro_batch}"])


def _line(row: Row) -> str:
    waits = {part: seconds for part, seconds in row.parts.items() if "communication" in part or "bubble" in part}
    parts = ", ".join(f"{part} {seconds * 1e3:.1f}" for part, seconds in waits.items())
    times = f"{row.predicted_s * 1e3:.1f} | {row.measured_s * 1e3:.1f} | {row.ratio:.2f}"
    return f"| {row.name} | {row.plan} | {times} | {parts} |"


def _head(command: str, rows: Sequence[Row]) -> list[str]:
    error = statistics.mean(abs(row.ratio - 1) for row in rows)
    return [
        "# Plans of tiny clusters, predicted beside measured",
        "",
        f"`{command}`, {date()}, commit {commit()}, {versions()}. Mean absolute error {error:.1%} (target 10 %). "
        "Milliseconds of a step, by what threads work and wait for delayed links; what is waited for as predicted.",
        "",
        "| cluster | plan | predicted | measured | ratio | predicted waits |",
        "|---|---|---|---|---|---|",
    ]


def main() -> int:
    """Measure the clusters, print the results, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(TINY), choices=list(TINY), metavar="NAME")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--markdown", type=Path, help="write the page there too")
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    os.environ |= {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    keep_freed_memory()
    rows = []
    for name in asked.only:
        rows.append(measure(name, asked.steps))
        sys.stdout.write(_line(rows[-1]) + "\n")
        sys.stdout.flush()
    page = [*_head(f"python -m tests.benchmarks.tiny_clusters --steps {asked.steps}", rows), *map(_line, rows)]
    sys.stdout.write("\n".join(page) + "\n")
    if asked.markdown is not None:
        asked.markdown.write_text("\n".join(page) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
