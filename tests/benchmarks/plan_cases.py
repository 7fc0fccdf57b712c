"""Speed of the plans of many cases, and time of planning, of one tree beside another tree.

Run: python -m tests.benchmarks.plan_cases [--only gpt2 ...] [--out rows.jsonl] [--plans FOLDER] [--beside other.jsonl]

A case is a model, a cluster or a mesh, a batch and a share of each device's memory. Models are dense, expert, encoder
with decoder, vision and recurrent models on 8 to 16,384 devices. Each case is planned in a process of its own on one
thread. To compare two trees, run the same cases in both trees, and pass the other tree's file to `--beside`.
`price_plans` writes such a file for the plans of another tree, priced by this tree.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import autoshard
from autoshard import AutoshardError, Cluster, Mesh
from tests.benchmarks.decoder import Decoder
from tests.benchmarks.deep_models import CASES, LLAMA_8B
from tests.models import build

Built = tuple[nn.Module, dict[str, Any]]
_TIMEOUT_S = 900.0
_LLAMA_13B = replace(LLAMA_8B, layers=40, hidden=5120, heads=40, kv_heads=40, ffn=13824, vocab=32000, sequence=4096)
_GPT2_XL = replace(
    LLAMA_8B, layers=48, hidden=1600, heads=25, kv_heads=25, head_size=64, ffn=6400, gated=False, vocab=50304,
    sequence=1024, tied=True, learned_positions=True, norm_bias=True, bias=True,
)  # fmt: skip
_DECODERS = {
    "gpt2-xl": _GPT2_XL,
    "llama3-8b": LLAMA_8B,
    "llama-13b": _LLAMA_13B,
    "llama3-70b": CASES["llama3-70b"].shape,
    "llama3-405b": CASES["llama3-405b"].shape,
}


def _on_meta(*shape: int, words: bool = True) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64 if words else torch.float32, device="meta")


def _labelled(name: str, inputs: torch.Tensor, labels: torch.Tensor, kind: str, **sizes: Any) -> Built:
    return build(kind, **sizes), {name: inputs, "labels": labels}


def _language(kind: str, length: int, **sizes: Any) -> Callable[[], Built]:
    words = _on_meta(1, length)
    return partial(_labelled, "input_ids", words, words, kind, **sizes)


_LARGE = {"width": 1024, "layers": 24, "heads": 16, "inner": 4096}
_OTHERS: Mapping[str, Callable[[], Built]] = {
    "t5-3b": _language(
        "t5", 512, width=1024, inner=16384, d_kv=128, heads=32, layers=24, num_decoder_layers=24, words=32128,
        dropout=0.0, pad_token_id=0, decoder_start_token_id=0,
    ),
    "mixtral-8x7b": _language(
        "mixtral", 4096, width=4096, inner=14336, layers=32, heads=32, key_heads=8, words=32000
    ),
    "deepseek-v3": _language("deepseek_v3", 4096, use_cache=False),
    "whisper-large": partial(
        _labelled, "input_features", _on_meta(1, 128, 3000, words=False), _on_meta(1, 448), "whisper",
        d_model=1280, encoder_layers=32, decoder_layers=32, encoder_attention_heads=20, decoder_attention_heads=20,
        encoder_ffn_dim=5120, decoder_ffn_dim=5120, num_mel_bins=128, use_cache=False,
    ),
    "vit-l": partial(
        _labelled, "pixel_values", _on_meta(1, 3, 224, 224, words=False), _on_meta(1), "vit", num_labels=1000, **_LARGE
    ),
    "bert-large": _language("bert", 512, dropout=0.0, **_LARGE),
    "mamba2-2.7b": _language(
        "mamba2", 2048, width=2560, layers=64, num_heads=80, head_dim=64, n_groups=1, state_size=128, words=50288,
        use_cache=False,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class PlanCase:
    """A planning task.

    Args:
        model: name of the model, a key of the tables above.
        node: type of the nodes, of eight devices each.
        nodes: number of nodes.
        batch: sequences of a step.
        memory: share of each device's memory that plans may take.
        axes: the mesh; empty: the whole cluster, and the planner chooses.
    """

    model: str
    node: str
    nodes: int
    batch: int
    memory: float = 1.0
    axes: tuple[tuple[str, int], ...] = ()

    @property
    def name(self) -> str:
        """A short name."""
        place = "x".join(f"{axis}{size}" for axis, size in self.axes) or f"{self.node}:{8 * self.nodes}"
        return f"{self.model}/{place}/{self.batch}/{self.memory:g}"

    @property
    def file(self) -> str:
        """The name of the file in which its plan is saved."""
        return f"{self.name.replace('/', '_').replace(':', '-')}.json"

    @property
    def cluster(self) -> Cluster:
        """The devices of the case."""
        return Cluster(self.node, self.nodes, 8)

    def built(self) -> tuple[nn.Module, Any]:
        """The model on the meta device, and its inputs of one sequence."""
        with torch.device("meta"):
            if self.model not in _DECODERS:
                return _OTHERS[self.model]()
            shape = _DECODERS[self.model]
            tokens = torch.zeros(1, shape.sequence, dtype=torch.int64)
            return Decoder(shape), (tokens, tokens)


_SPACES = (
    ("gpt2-xl", "a100_sxm_80gb", 1, 512), ("llama3-8b", "h100_sxm", 1, 64), ("llama3-8b", "h100_sxm", 8, 64),
    ("llama3-8b", "h100_sxm", 8, 128), ("llama3-8b", "h100_sxm", 8, 256), ("llama3-8b", "h100_sxm", 8, 512),
    ("llama-13b", "a100_sxm_80gb", 2, 128), ("llama3-70b", "h100_sxm", 8, 256), ("llama3-70b", "h100_sxm", 16, 512),
    ("llama3-70b", "h100_sxm", 128, 2048), ("llama3-405b", "h100_sxm", 128, 512),
    ("llama3-405b", "h100_sxm", 2048, 2048), ("mixtral-8x7b", "h100_sxm", 8, 256),
    ("deepseek-v3", "h100_sxm", 256, 7680), ("t5-3b", "a100_sxm_80gb", 2, 128), ("whisper-large", "h100_sxm", 1, 128),
    ("vit-l", "h100_sxm", 1, 1024), ("bert-large", "h100_sxm", 1, 256), ("mamba2-2.7b", "h100_sxm", 1, 64),
)  # fmt: skip
_MESHES = (
    (("data", 8), ("model", 8)), (("data", 64),), (("data", 16), ("model", 4)),
    (("pipeline", 4), ("data", 4), ("model", 4)), (("pipeline", 8), ("data", 8)),
)  # fmt: skip
_MEMORY = (1.0, 0.6, 0.35)


def cases() -> list[PlanCase]:
    """All cases: on clusters, and on fixed meshes."""
    free = [PlanCase(*space, memory=memory) for space in _SPACES for memory in _MEMORY]
    fixed = [
        PlanCase("llama3-8b", "h100_sxm", 8, 64, memory=memory, axes=axes) for axes in _MESHES for memory in _MEMORY
    ]
    return free + fixed


@dataclass(frozen=True, slots=True)
class PlannedCase:
    """The figures of a planned case: seconds of the step, bytes of a device, and CPU seconds and bytes of
    planning.

    `words` describe the recipe, or the error if there is no plan.
    """

    name: str
    step_s: float
    peak_bytes: int
    cpu_s: float
    planner_bytes: int
    mfu: float
    stages: int
    words: str


def plan_case(case: PlanCase, plans: Path | None = None) -> PlannedCase:
    """Plan a case in this process. If `plans` is given, the plan is saved in this folder."""
    model, inputs = case.built()
    cluster = case.cluster
    target = cluster.mesh(Mesh(dict(case.axes))) if case.axes else cluster
    budget = None if case.memory == 1.0 else int(case.memory * cluster.device.memory_bytes)
    start = time.process_time()
    try:
        plan = autoshard.plan(
            model, target, example_inputs=inputs, optimizer="adamw", precision="bf16", global_batch=case.batch,
            memory_budget=budget, time_budget_s=600.0, progress=False,
        )  # fmt: skip
    except AutoshardError as error:
        return PlannedCase(case.name, math.inf, 0, _cpu_s(start), _peak(), 0.0, 0, f"{type(error).__name__}: {error}")
    if plans is not None:
        plan.save(plans / case.file)
    predicted = plan.predicted
    words = f"{plan.mesh}; {plan.recipe.words if plan.recipe is not None else 'specs'}"
    step_s, peak = predicted.step_time_s, predicted.peak_memory_bytes
    stages = len(plan.stages)
    return PlannedCase(case.name, step_s, peak, _cpu_s(start), _peak(), predicted.mfu or 0.0, stages, words)


def _cpu_s(start: float) -> float:
    return time.process_time() - start


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _apart(name: str, plans: Path | None) -> PlannedCase:
    """Plan a case in its own process."""
    command = [sys.executable, "-m", "tests.benchmarks.plan_cases", "--one", name]
    command += [] if plans is None else ["--plans", str(plans)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return PlannedCase(name, math.inf, 0, _TIMEOUT_S, 0, 0.0, 0, "timeout")
    if done.returncode:
        return PlannedCase(name, math.inf, 0, 0.0, 0, 0.0, 0, f"failed: {done.stderr.splitlines()[-1:]}")
    return PlannedCase(**json.loads(done.stdout.splitlines()[-1]))


def read_cases(path: Path) -> dict[str, PlannedCase]:
    """The planned cases of a file, by name."""
    return {each.name: each for each in (PlannedCase(**json.loads(line)) for line in path.read_text().splitlines())}


def table(rows: Mapping[str, PlannedCase], beside: Mapping[str, PlannedCase]) -> Table:
    """A table with a line for each case, with the step and the CPU seconds of the other tree."""
    result = Table("case", "step s", "of other", "peak GiB", "MFU", "CPU s", "other CPU s", "planner GiB", "plan")
    for name, row in rows.items():
        other = beside.get(name)
        ratio = "" if other is None or math.inf in (row.step_s, other.step_s) else f"{row.step_s / other.step_s:.4f}"
        result.add_row(
            name, f"{row.step_s:.4g}", ratio, f"{row.peak_bytes / 2**30:.1f}", f"{row.mfu:.2f}", f"{row.cpu_s:.1f}",
            "" if other is None else f"{other.cpu_s:.1f}", f"{row.planner_bytes / 2**30:.2f}", row.words[:100],
        )  # fmt: skip
    return result


def _ratios(rows: Mapping[str, PlannedCase], beside: Mapping[str, PlannedCase]) -> Iterator[float]:
    for name in rows.keys() & beside.keys():
        if math.isfinite(rows[name].step_s) and math.isfinite(beside[name].step_s):
            yield rows[name].step_s / beside[name].step_s


def main(arguments: list[str]) -> None:
    """Plan the cases and print their rows."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.plan_cases")
    parser.add_argument("--only", nargs="*", default=[""], help="beginnings of names")
    parser.add_argument("--out", type=Path, help="file to which a line of JSON is added for each case")
    parser.add_argument("--plans", type=Path, help="folder in which each plan is saved")
    parser.add_argument("--beside", type=Path, help="such a file of another tree")
    parser.add_argument("--one", help="plan this case in this process, and print JSON")
    options = parser.parse_args(arguments)
    known = {case.name: case for case in cases()}
    if options.one:
        torch.set_num_threads(1)
        sys.stdout.write(json.dumps(asdict(plan_case(known[options.one], options.plans))) + "\n")
        return
    rows = {}
    for name in known:
        if name.startswith(tuple(options.only)):
            rows[name] = _apart(name, options.plans)
            if options.out is not None:
                with options.out.open("a") as file:
                    file.write(json.dumps(asdict(rows[name])) + "\n")
    beside = read_cases(options.beside) if options.beside is not None else {}
    console = Console(width=220)
    console.print(table(rows, beside))
    if ratios := list(_ratios(rows, beside)):
        mean, most = statistics.mean(ratios), max(ratios)
        console.print(f"{len(ratios)} cases, step of the other's: mean {mean:.4f}, most {most:.4f}")


if __name__ == "__main__":
    main(sys.argv[1:])
