"""Measured and predicted memory of each rank of a pipeline, at the peak and in flight.

Memory in flight belongs to micro-batches between forward and backward: values that forwards save, and values that the
first halves of cut backwards keep. It is counted behind each task by storages, without parameters, state and inputs.
The peak is the largest memory of operators (`tests.benchmarks.live_memory`). Neither depends on the load of the
machine. A Llama of 8 layers takes a step of 8 micro-batches, with AdamW, under each schedule.

    python -m tests.benchmarks.pipeline_memory [--ranks 2 4] [--schedules 1F1B ...] [--markdown FILE]

The exit status is 1 if a rank differs by more than 5 %.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import autoshard
from autoshard import Mesh, Recipe
from autoshard.ir.pipeline_order import StageTask
from autoshard.runtime.agreement.digests import table_on
from autoshard.runtime.program_run import ProgramRun
from passes.memory.pipeline_memory import pipeline_memory
from tests.benchmarks.live_memory import LiveMemory
from tests.models import build, words
from tests.runtime.processes import report, run_checks

TOLERANCE = 0.05
MICRO_BATCHES, SEQUENCES, TOKENS, VOCABULARY = 8, 16, 128, 512

SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    "GPipe": {"recipe": Recipe(schedule="GPipe")},
    "1F1B": {"recipe": Recipe(schedule="1F1B")},
    "interleaved": {"recipe": Recipe(schedule="Interleaved1F1B", virtual_stages=2)},
    "ZB-H1": {"recipe": Recipe(schedule="InterleavedZeroBubble")},
}


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes in use on a rank in a step, measured and predicted."""

    rank: int
    predicted_peak: int
    measured_peak: int
    predicted_in_flight: int
    measured_in_flight: int

    @property
    def worst_error(self) -> float:
        """The larger of both relative errors."""
        pairs = (self.predicted_peak, self.measured_peak), (self.predicted_in_flight, self.measured_in_flight)
        return max(abs(predicted / measured - 1) for predicted, measured in pairs)


@dataclass(slots=True)
class InFlight:
    """The most bytes that micro-batches hold between forward and backward."""

    held: set[int]
    most_bytes: int = 0
    _counted: dict[int, int] = field(default_factory=dict)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Within this context, memory in flight is counted after each task of a step."""
        count, saved = self._count, ProgramRun.run_task

        def run_task(self: ProgramRun, task: StageTask) -> None:
            saved(self, task)
            count(self)

        ProgramRun.run_task = run_task
        try:
            yield
        finally:
            ProgramRun.run_task = saved

    def _count(self, run: ProgramRun) -> None:
        found = {}
        for stage in run.stages.values():
            hoisted = set(map(_storage, _tensors(stage.hoisted)))
            for tensor in _tensors([stage.saved, stage.for_second_half]):
                if _storage(tensor) not in self.held | hoisted:
                    found[_storage(tensor)] = tensor.untyped_storage().nbytes()
        self.most_bytes = max(self.most_bytes, sum(found.values()))


def _tensors(values: Any) -> list[Tensor]:
    leaves = (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor))
    return [leaf.to_local() if isinstance(leaf, DTensor) else leaf for leaf in leaves]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def measure(step: Any, model: nn.Module, inputs: Mapping[str, Tensor]) -> Memory:
    """Measure this rank's memory in a second step; all ranks call this function."""
    step(**inputs)
    state = _tensors([list(entry.values()) for entry in step.optimizer.state.values()])
    program, rank = step.sharded.program, dist.get_rank()
    stages = [program.staged.stages[number] for number in program.own_stages]
    read = {slot.slot.name for stage in stages for slot in stage.phased.lowered.inputs}
    given, apart = [], [table_on(torch.device("cpu"))]
    for index, name in enumerate(sorted(inputs)):  # as a call's keywords are numbered
        (given if f"input:{index}" in read else apart).append(inputs[name])
    held = [item.detach() for item in (*model.parameters(), *model.buffers(), *state, *given) if not item.is_meta]
    in_flight = InFlight({_storage(item) for item in _tensors(held)})
    with LiveMemory(held, apart) as memory:
        step(**inputs)
    with in_flight.counting():
        step(**inputs)
    place = step.plan.order.stage_ranks.index(rank)
    return Memory(
        rank,
        step.plan.stages[place].predicted.peak_memory_bytes,
        memory.peak_bytes,
        pipeline_memory(program.staged)[rank].in_flight_bytes,
        in_flight.most_bytes,
    )


def _llama() -> tuple[nn.Module, dict[str, Tensor]]:
    sizes = {"words": VOCABULARY, "width": 128, "inner": 256, "layers": 8, "heads": 4, "key_heads": 2, "length": TOKENS}
    return build("llama", **sizes), words(SEQUENCES, TOKENS, VOCABULARY)


def _of_llama(name: str, folder: Path) -> None:
    """Measure a schedule on this rank, and write the result."""
    model, inputs = _llama()
    step = autoshard.compile(
        *(model, Mesh({"pipeline": dist.get_world_size()})),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        micro_batches=MICRO_BATCHES,
        max_grad_norm=1.0,
        time_budget_s=5.0,
        **SCHEDULES[name],
    )
    found = measure(step, model, inputs)
    Path(folder, f"{name}.{found.rank}.json").write_text(json.dumps(asdict(found)))


def measure_llama(ranks: int, names: Sequence[str]) -> dict[str, list[Memory]]:
    """The memory of each rank, by the name of the schedule."""
    with tempfile.TemporaryDirectory() as folder:
        checks = {name: partial(_of_llama, name, Path(folder)) for name in names}
        outcomes = run_checks(checks, ranks=ranks, deadline_s=3600.0)
        for name in names:
            report(outcomes, name)
        texts = {name: [Path(folder, f"{name}.{rank}.json").read_text() for rank in range(ranks)] for name in names}
    return {name: [Memory(**json.loads(text)) for text in each] for name, each in texts.items()}


def table_of(found: Mapping[int, Mapping[str, Sequence[Memory]]]) -> str:
    """A Markdown table of all ranks, with predicted and measured memory."""
    rows = [
        "| ranks | schedule | rank | predicted peak | measured | ratio | predicted in flight | measured | ratio |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for ranks, of_schedules in found.items():
        for name, memories in of_schedules.items():
            rows += [f"| {ranks} | {name} | {_cells(memory)} |" for memory in memories]
    return "\n".join(rows) + "\n"


def _cells(memory: Memory) -> str:
    """The cells of a rank: mebibytes, and ratios of predicted to measured memory."""
    cells = [str(memory.rank)]
    for predicted, measured in (
        (memory.predicted_peak, memory.measured_peak),
        (memory.predicted_in_flight, memory.measured_in_flight),
    ):
        cells += [f"{predicted / 2**20:.2f}", f"{measured / 2**20:.2f}", f"{predicted / measured:.3f}"]
    return " | ".join(cells)


def main() -> int:
    """Print the table, and return 1 if a rank's memory differs by more than 5 %."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--markdown", type=Path, help="write the table there too")
    options = parser.parse_args()
    found = {ranks: measure_llama(ranks, options.schedules) for ranks in options.ranks}
    text = table_of(found)
    sys.stdout.write(text)
    if options.markdown is not None:
        options.markdown.write_text(text)
    every = [memory for of_schedules in found.values() for each in of_schedules.values() for memory in each]
    return int(max(memory.worst_error for memory in every) > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
