"""Delay of a step by saving a checkpoint, beside the copy of the saved bytes: two Gloo processes, whole steps.

    python -m tests.benchmarks.save_delay [--rounds 15] [--model llama]

A round has four parts in turn. First comes a plain copy of this rank's part (`clone` of each tensor). The call of
`save`, and a step while the checkpoint is written, follow. Last comes a step after the checkpoint is complete. Medians
over rounds are by the machine's clock, and by the processor time of the step's thread, which other processes do not
change.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from rich.console import Console

import autoshard
from autoshard import Checkpoints, Mesh, P
from autoshard.checkpoints.ranks import Ranks
from autoshard.checkpoints.snapshot import take
from autoshard.checkpoints.state import TrainingState, model_of
from autoshard.runtime.train_step import TrainStep
from tests.benchmarks.step_cases import CASES, make_batches, make_model
from tests.runtime.processes import run_checks

PLANS = {"fully sharded": {"*weight": P("data"), "*:*weight": P("data")}, "data parallel": {"*": P()}}
TOKENS = 128


def _timed(run: Callable[[], object]) -> tuple[float, float]:
    """Seconds of a call by the clock, and by the processor time of this thread."""
    wall, thread = time.perf_counter(), time.thread_time()
    run()
    return time.perf_counter() - wall, time.thread_time() - thread


def _copy(step: TrainStep, ranks: Ranks) -> Callable[[], list[torch.Tensor]]:
    """A function that copies the tensors that `save` copies."""
    parts = take(TrainingState(step, {}).parts(0), ranks, copies=False)
    tensors = {
        item.value.data_ptr(): item.value for part in parts for item in part.items.values() if item.source is not None
    }

    def clone() -> list[torch.Tensor]:
        return [item.clone() for item in tensors.values()]

    return clone


def measure(model: str, plan: str, rounds: int, room: str) -> None:
    """Save and train in turns. The first rank writes the medians to a file."""
    case = next(case for case in CASES if (case.model, case.tokens) == (model, TOKENS))
    made, (batch,) = make_model(case), make_batches(case, 1)
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-4, fused=True)
    step = autoshard.compile(
        made, Mesh({"data": 2}), optimizer=optimizer, example_inputs=batch, constraints=PLANS[plan]
    )
    ranks = Ranks.of(model_of(step))
    checkpoints = Checkpoints(Path(room, plan), keep=1)
    step(**batch)
    rows = []
    for number in range(rounds + 2):
        clone = _copy(step, ranks)
        dist.barrier()
        copy = _timed(clone)
        dist.barrier()
        save = _timed(partial(checkpoints.save, step, at=number))
        beside = _timed(partial(step, **batch))
        checkpoints.wait()
        dist.barrier()
        alone = _timed(partial(step, **batch))
        rows.append({"copy": copy, "save": save, "step beside": beside, "step alone": alone})
    if dist.get_rank() == 0:
        rows = rows[2:]
        medians = {key: [statistics.median(row[key][kind] for row in rows) for kind in (0, 1)] for key in rows[0]}
        held = _copy(step, ranks)()
        copied = {"tensors": len(held), "bytes": sum(item.nbytes for item in held)}
        Path(room, f"{plan}.json").write_text(json.dumps({"medians": medians, "copied": copied}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--model", default="llama")
    options = parser.parse_args()
    console = Console()
    with TemporaryDirectory() as room:
        checks = {plan: partial(measure, options.model, plan, options.rounds, room) for plan in PLANS}
        outcomes = run_checks(checks, ranks=2, deadline_s=580)
        for plan in PLANS:
            if outcomes[plan]:
                raise SystemExit(outcomes[plan])
            written = json.loads(Path(room, f"{plan}.json").read_text())
            found, copied = written["medians"], written["copied"]
            size = f"{copied['tensors']} tensors, {copied['bytes'] / 1e6:.0f} MB on the first rank"
            console.print(f"[bold]{options.model}, {plan}[/bold]: {size}")
            console.print("  ms by          machine     thread")
            for name, (wall, thread) in found.items():
                console.print(f"  {name:12} {wall * 1e3:9.1f} {thread * 1e3:10.1f}")
            ratio = found["save"][1] / found["copy"][1]
            console.print(f"  save : copy {ratio:.2f} by processor; steps beside : alone {_ratio(found):.2f}")


def _ratio(found: dict[str, list[float]]) -> float:
    return found["step beside"][1] / found["step alone"][1]


if __name__ == "__main__":
    main()
