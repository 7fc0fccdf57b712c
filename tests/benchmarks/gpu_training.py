"""Training steps on one GPU: compiled by autoshard, by hand in PyTorch, and under `torch.compile`.

    python -m tests.benchmarks.gpu_training                     (make gpu-bench runs it too)
    python -m tests.benchmarks.gpu_training --models llama --contenders 'eager,ours' --output page.md

Models of transformers have random weights in bfloat16, and AdamW is fused for all contenders. Contenders take turns in
one process. In each round every contender runs a few steps, timed until the device is done.

The page shows medians, the plan's prediction, and the peak of allocated memory of a step with the contender's own
state. It shows the loss of the fourth step, which must agree but for rounding, and the seconds until the third step is
done, compilation included. `--tiny` runs small models on a CPU, as a test of the benchmark.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
import triton
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autoshard
from tests.models import build

_RESULTS = Path(__file__).with_name("results")
_STEPS, _BATCHES = 4, 4

Step = Callable[[Mapping[str, Tensor]], Tensor]


@dataclass(frozen=True, slots=True)
class Training:
    """A model and the batch of a step.

    Args:
        make: makes the model on the default device.
        vocabulary: number of words of the batch.
        batch, tokens: sequences of a step, and their length.
    """

    make: Callable[[], nn.Module]
    vocabulary: int
    batch: int
    tokens: int


@dataclass(slots=True)
class Found:
    """The measures of one contender.

    Args:
        ready_s: seconds until the third step was done.
        times_ms: time of a step in each round.
        peak_bytes: peak of its state and a step.
        loss: loss of its fourth step.
        predicted_ms: prediction of our plan.
        error: reason of a failure.
    """

    ready_s: float = 0.0
    times_ms: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    loss: float = float("nan")
    predicted_ms: float | None = None
    error: str = ""


def _training(kind: str, layers: int, width: int, heads: int, words: int, batch: int, tokens: int) -> Training:
    sizes: dict[str, Any] = {"layers": layers, "width": width, "heads": heads, "words": words}
    if kind == "llama":
        sizes |= {"key_heads": heads // 2, "inner": 11 * width // 4}
    else:
        sizes |= {"inner": 4 * width, "dropout": 0.0}
    return Training(lambda: build(kind, **sizes), words, batch, tokens)


TRAININGS: Mapping[str, Training] = {
    "gpt2": _training("gpt2", 12, 768, 12, 50304, 16, 1024),
    "llama": _training("llama", 8, 2048, 16, 32000, 4, 2048),
    "bert": _training("bert", 12, 768, 12, 30528, 8, 128),
}
"""GPT-2 of 124 million parameters, eight layers of a Llama of 1B's width, and BERT on a batch that launches bound."""

TINY: Mapping[str, Training] = {kind: _training(kind, 2, 64, 4, 128, 2, 16) for kind in TRAININGS}


def _adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def _by_hand(model: nn.Module, forward: Callable[..., Any]) -> Step:
    optimizer = _adamw(model)

    def step(batch: Mapping[str, Tensor]) -> Tensor:
        optimizer.zero_grad()
        loss = forward(**batch).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A step of autoshard that takes its batch as one mapping, as the functions of the other contenders do."""

    step: Any

    def __call__(self, batch: Mapping[str, Tensor]) -> Tensor:
        return self.step(**batch)


def _ours(model: nn.Module, backend: str, *, cuda_graph: bool = False) -> Step:
    device = next(model.parameters()).device.type
    mesh = init_device_mesh(device, (1,), mesh_dim_names=("data",))
    step = autoshard.compile(
        model, mesh, optimizer=_adamw(model), backend=backend, options=autoshard.Options(cuda_graph=cuda_graph)
    )
    return _Compiled(step)


CONTENDERS: Mapping[str, Callable[[nn.Module], Step]] = {
    "eager": lambda model: _by_hand(model, model),
    "torch.compile": lambda model: _by_hand(model, torch.compile(model, dynamic=False)),
    "torch.compile, graphs": lambda model: _by_hand(model, torch.compile(model, dynamic=False, mode="reduce-overhead")),
    "ours": lambda model: _ours(model, "auto"),
    "ours, graph": lambda model: _ours(model, "auto", cuda_graph=True),
    "ours, triton": lambda model: _ours(model, "triton"),
    "ours, triton, graph": lambda model: _ours(model, "triton", cuda_graph=True),
    "ours, inductor": lambda model: _ours(model, "inductor"),
    "ours, inductor, graph": lambda model: _ours(model, "inductor", cuda_graph=True),
}


class Race:
    """A race of contenders on one model, which run in turns.

    Args:
        training: the model and its batches.
        device: "cuda", or "cpu" to try the benchmark.
    """

    def __init__(self, training: Training, device: str) -> None:
        self._training, self._device = training, device
        with torch.device(device):
            torch.manual_seed(1)
            words = [torch.randint(0, training.vocabulary, (training.batch, training.tokens)) for _ in range(_BATCHES)]
        self._batches = [{"input_ids": each, "labels": each} for each in words]
        self._steps: dict[str, Step] = {}
        self.found: dict[str, Found] = {}

    def enter(self, name: str) -> None:
        """Make a contender and run four steps. Its peak memory is that of the last two, in which graphs are
        recorded too."""
        found = self.found[name] = Found()
        gc.collect()
        start, before = time.perf_counter(), self._allocated()
        try:
            torch.manual_seed(0)
            with torch.device(self._device):
                model = self._training.make()
            step = CONTENDERS[name](model.to(torch.bfloat16).train())
            for batch in self._batches[:2]:
                step(batch)
            if self._device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            step(self._batches[2])
            self._wait()
            found.ready_s = time.perf_counter() - start
            found.loss = float(step(self._batches[3]))
            if self._device == "cuda":
                found.peak_bytes = torch.cuda.max_memory_allocated() - before
        except (RuntimeError, TypeError, ValueError, autoshard.AutoshardError) as error:
            found.error = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            return
        self._steps[name] = step
        if isinstance(step, _Compiled):
            found.predicted_ms = 1e3 * step.step.plan.predicted.step_time_s

    def round(self, index: int) -> None:
        """Run a few steps of every contender; each second round reverses the order."""
        names = list(self._steps)
        for name in names if index % 2 else names[::-1]:
            self._wait()
            start = time.perf_counter()
            for batch in self._batches[:_STEPS]:
                self._steps[name](batch)
            self._wait()
            self.found[name].times_ms.append(1e3 * (time.perf_counter() - start) / _STEPS)

    def _wait(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated() if self._device == "cuda" else 0


def table(name: str, training: Training, found: Mapping[str, Found]) -> list[str]:
    """The measures of one model's contenders, as Markdown."""
    lines = [
        f"## {name}: {training.batch} x {training.tokens} tokens",
        "",
        "| contender | step ms | of eager | tokens/s | peak GiB | predicted ms | ready s | loss |",
        "|---|---|---|---|---|---|---|---|",
    ]
    medians = {each: statistics.median(result.times_ms) for each, result in found.items() if result.times_ms}
    for each, result in found.items():
        if result.error or each not in medians:
            lines.append(f"| {each} | {result.error} |  |  |  |  |  |  |")
            continue
        ratio = f"{medians[each] / medians['eager']:.3f}" if "eager" in medians else ""
        predicted = "" if result.predicted_ms is None else f"{result.predicted_ms:.2f}"
        tokens = training.batch * training.tokens / (medians[each] / 1e3)
        shown = (f"{medians[each]:.2f}", ratio, f"{tokens:,.0f}", f"{result.peak_bytes / 2**30:.2f}", predicted)
        lines.append(f"| {' | '.join((each, *shown, f'{result.ready_s:.0f}', f'{result.loss:.4f}'))} |")
    return [*lines, ""]


def main(arguments: list[str]) -> None:
    """Run the race, and write the page anew after each contender."""
    parser = argparse.ArgumentParser(description=__doc__)
    day = time.strftime("%Y-%m-%d")
    parser.add_argument("--output", type=Path, default=_RESULTS / f"gpu_training_{day}.md", help="the page")
    parser.add_argument("--models", default=",".join(TRAININGS), help="which of them, by commas")
    parser.add_argument("--contenders", default=";".join(CONTENDERS), help="which of them, by semicolons")
    parser.add_argument("--rounds", type=int, default=12, help="of each model")
    parser.add_argument("--tiny", action="store_true", help="small models on a CPU")
    options = parser.parse_args(arguments)
    device = "cpu" if options.tiny else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("gpu_training trains on a GPU, and this machine has none that torch sees; --tiny runs on the CPU.")
    dist.init_process_group("gloo" if options.tiny else "nccl", store=dist.HashStore(), rank=0, world_size=1)
    where = "CPU" if options.tiny else torch.cuda.get_device_name()
    versions = f"torch {torch.__version__}, triton {triton.__version__}, transformers {transformers.__version__}"
    lines = [
        "# Training on one GPU",
        "",
        f"By `make gpu-bench` on {day}: {where}, {versions}; bfloat16, fused AdamW.",
        "",
    ]
    for name in options.models.split(","):
        training = (TINY if options.tiny else TRAININGS)[name]
        race = Race(training, device)
        for contender in options.contenders.split(";"):
            race.enter(contender)
            race.round(0)  # a GPU's time is dear: where it ends early, there is a page all the same
            options.output.write_text("\n".join([*lines, *table(name, training, race.found)]), encoding="utf-8")
        for index in range(1, options.rounds):
            race.round(index)
        lines += table(name, training, race.found)
        options.output.write_text("\n".join(lines), encoding="utf-8")
        sys.stdout.write("\n".join(table(name, training, race.found)))
        del race
        torch.compiler.reset()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
