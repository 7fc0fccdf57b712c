"""Peak resident memory of each rank over the life of a model from meta, phase by phase.

A Llama is built on meta, compiled fully sharded, initialised, and trained for three steps and one step of another
shape. The model is then saved and exported. Two ranks load the checkpoint. All earlier ranks load the exported weights,
and live as the first model did. No phase of any rank may take more than 1.15 times the sum of predicted peak and
largest tensor, plus the interpreter's memory. A tiny model with the same life first measures the interpreter's part:
imports, process groups, graphs.

    python -m tests.benchmarks.rank_memory [--model 0.6b] [--ranks 4]
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn

import autoshard
from autoshard import Mesh, P
from autoshard.runtime.weights.model_weights import Weights
from passes.driver.planner import Planner
from tests.runtime.processes import report, run_checks

MARGIN = 0.15
STEPS = 3

MODELS: Mapping[str, Mapping[str, int]] = {
    "tiny": {"vocab_size": 64, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1},
    "small": {"vocab_size": 4096, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 2},
    "0.6b": {"vocab_size": 32000, "hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 18},
}
SHARDED = {"*.weight": P("data"), "input:*": P("data")}
"""Every parameter is split along its first dim."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Peak memory of a rank in a phase, and its limit."""

    name: str
    rank: int
    peak_bytes: int
    allowed_bytes: int
    seconds: float


@dataclass(slots=True)
class Life:
    """The phases of a rank so far, each with its peak memory and seconds. The peak of an inner phase does not
    count in its outer phase."""

    peaks: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    _open: list[str] = field(default_factory=list)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Within this context, peak memory and time belong to the phase `name`."""
        start = time.monotonic()
        self._count()
        self._open.append(name)
        try:
            yield
        finally:
            self._count()
            self._open.pop()
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start

    def _count(self) -> None:
        if self._open:
            self.peaks[self._open[-1]] = max(self.peaks.get(self._open[-1], 0), peak_bytes())
        forget_peak()

    @contextmanager
    def following(self, owner: type, method: str, name: str) -> Iterator[None]:
        """Within this context, calls of a method are phase `name`."""
        saved = getattr(owner, method)

        def follow(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return saved(*args, **kwargs)

        setattr(owner, method, follow)
        try:
            yield
        finally:
            setattr(owner, method, saved)


def peak_bytes() -> int:
    """The largest resident memory of this process since `forget_peak`."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, "Linux says so"
    return int(found[1]) * 1024


def forget_peak() -> None:
    """Reset the peak to the present resident memory."""
    Path("/proc/self/clear_refs").write_text("5")


def built(name: str) -> nn.Module:
    """A Llama on the meta device."""
    sizes: dict[str, Any] = {**MODELS[name], "num_attention_heads": 8, "num_key_value_heads": 8}
    config = transformers.LlamaConfig(**sizes, use_cache=False)
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config)


def batch(sequences: int, tokens: int) -> dict[str, torch.Tensor]:
    """A batch of tokens for training."""
    numbers = (torch.arange(sequences * tokens) % 64).view(sequences, tokens)
    return {"input_ids": numbers, "labels": numbers}


def compiled(name: str, life: Life) -> Any:
    """A compiled step, with the phases of compiling recorded in `life`."""
    ranks = dist.get_world_size()
    with life.phase("construct"):
        model = built(name)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with (
        life.phase("compile"),
        life.following(Planner, "_trace", "trace"),
        life.following(Planner, "_search_for", "plan"),
        life.following(Weights, "place", "place"),
    ):
        mesh = Mesh({"data": ranks})
        return autoshard.compile(
            *(model, mesh),
            optimizer=optimizer,
            example_inputs=batch(ranks, 16),
            constraints=SHARDED,
            memory_budget=64 << 30,
            time_budget_s=2.0,
        )


def train(name: str, life: Life, folder: Path) -> Any:
    """Compile a model from meta, initialise and train it, save a checkpoint, and export the weights."""
    step = compiled(name, life)
    with life.phase("init_weights"):
        step.init_weights(0)
    _train_and_write(step, life, folder / f"{name} run", folder / f"{name} exported")
    return step


def _train_and_write(step: Any, life: Life, run: Path, exported: Path) -> None:
    """Train a step whose weights have values, save a checkpoint, and export the weights."""
    for number in range(STEPS):
        with life.phase(f"step {number + 1}"):
            step(**batch(dist.get_world_size(), 16))
    with life.phase("new shape"):
        step(**batch(dist.get_world_size(), 24))
    with life.phase("save"):
        checkpoints = autoshard.Checkpoints(run, asynchronous=False)
        checkpoints.save(step, at=1)
        checkpoints.wait()
    with life.phase("export"):
        step.export(exported)


def resume(name: str, life: Life, folder: Path) -> Any:
    """Compile a model, load a checkpoint, and run a step."""
    step = compiled(name, life)
    with life.phase("load"):
        assert autoshard.Checkpoints(folder / f"{name} run").load(step) == 1
    with life.phase("step"):
        step(**batch(dist.get_world_size(), 16))
    return step


def begin(name: str, life: Life, folder: Path) -> Any:
    """Load exported weights, save a checkpoint, and export weights into the existing folder."""
    step = compiled(name, life)
    with life.phase("load_weights"):
        step.load_weights(folder / f"{name} exported")
    _train_and_write(step, life, folder / f"{name} second run", folder / f"{name} exported")
    return step


LIVES: Mapping[str, Callable[[str, Life, Path], Any]] = {"train": train, "resume": resume, "begin": begin}


def live(kind: str, name: str, folder: Path) -> None:
    """Run a kind of life on this rank, first with a tiny model and then with the named model. The phases are
    written to a file."""
    LIVES[kind]("tiny", Life(), folder)
    gc.collect()
    forget_peak()
    own, life = peak_bytes(), Life()
    step = LIVES[kind](name, life, folder)
    largest = max(weight.nbytes for weight in built(name).parameters())
    allowed = own + int((1 + MARGIN) * (step.plan.predicted.peak_memory_bytes + largest))
    rank = dist.get_rank()
    found = [Phase(key, rank, peak, allowed, life.seconds[key]) for key, peak in life.peaks.items()]
    Path(folder, f"{kind}.{rank}.json").write_text(json.dumps([asdict(phase) for phase in found]))


def measure(name: str, ranks: Mapping[str, int], folder: Path, deadline_s: float = 300.0) -> dict[str, list[Phase]]:
    """The phases of all ranks, by the kind of life. `ranks` gives the number of ranks of each kind."""
    found = {}
    for kind, count in ranks.items():
        report(run_checks({kind: partial(live, kind, name, folder)}, ranks=count, deadline_s=deadline_s), kind)
        said = [json.loads(Path(folder, f"{kind}.{rank}.json").read_text()) for rank in range(count)]
        found[kind] = [Phase(**phase) for phases in said for phase in phases]
    return found


def worst(phases: list[Phase]) -> dict[str, Phase]:
    """Return each phase of the rank with the largest peak."""
    result: dict[str, Phase] = {}
    for phase in phases:
        if phase.name not in result or phase.peak_bytes > result[phase.name].peak_bytes:
            result[phase.name] = phase
    return result


def main() -> int:
    """Print the peaks; return 1 if a peak exceeds its limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="0.6b")
    parser.add_argument("--ranks", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ranks = {"train": options.ranks, "resume": 2, "begin": options.ranks}
        found = measure(options.model, ranks, Path(folder), deadline_s=3600.0)
    is_over = False
    for kind, phases in found.items():
        for name, phase in worst(phases).items():
            is_over |= phase.peak_bytes > phase.allowed_bytes
            share = phase.peak_bytes / phase.allowed_bytes
            sys.stdout.write(
                f"{kind:8} {name:14} {phase.peak_bytes / 2**20:8.0f} MiB of {phase.allowed_bytes / 2**20:8.0f} "
                f"({share:4.0%}), rank {phase.rank}, {phase.seconds:6.1f} s\n"
            )
    return int(is_over)


if __name__ == "__main__":
    sys.exit(main())
