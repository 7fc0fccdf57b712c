"""Two Gloo processes hide the communication that their products can hide; a clock that counts products measures it.

The clock makes the waits of a slow network exact. A wait depends only on the order in which a process issues, computes
and waits, and never on the load of the machine. Each plan splits another part of a Llama over the axis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

import autoshard
from autoshard import Cluster, Mesh, P, PartitionSpec
from autoshard.ir.lowered import PhasedProgram
from autoshard.runtime.train_step import TrainStep
from autoshard.testing import Link, Transfer, delayed_mesh, record_transfers
from cost_models.hardware import node_type
from passes.lowering.lower_program import lower_prepared
from passes.lowering.lowering_options import LoweringOptions
from tests.benchmarks.step_tensor_parallel import tensor_specs
from tests.end_to_end.work_clock import Rig, WorkClock, products_s, share_hidden, walk
from tests.models import build, words
from tests.runtime.processes import on_processes

AXIS, WORDS, HIDDEN = "model", 256, 256
RATIO, LEAST = 0.4, 0.85
"""Time of communication as a share of the products' time, and the least share to hide of all that can be hidden."""

LINKED = Cluster(node_type("cpu_laptop").with_network("ethernet_1g"), nodes=2, devices_per_node=1)
"""Two ranks whose processors wait for the link, unlike ranks of one machine, which are busy with messages."""


def _all(model: nn.Module, spec: PartitionSpec) -> dict[str, PartitionSpec]:
    return {name: spec for name, _ in model.named_parameters()}


PLANS: Mapping[str, Callable[[nn.Module], Mapping[str, PartitionSpec]]] = {
    "data parallel": lambda model: {**_all(model, P()), "exp*:*": P(), "input:*": P(AXIS)},
    "ZeRO-1": lambda model: {**_all(model, P()), "exp*:*": P(AXIS), "input:*": P(AXIS)},
    "ZeRO-3": lambda model: {**_all(model, P(AXIS)), "exp*:*": P(AXIS), "input:*": P(AXIS)},
    "tensor parallel": tensor_specs,
}
"""Constraints of each plan, by its name, on parameters, the state of AdamW (`exp*`) and inputs."""
SIZES = {name: (4, 64) if name == "tensor parallel" else (8, 128) for name in PLANS}
"""Rows and length of the batch; with few tokens, plans send activations and not weights."""


def compiled(name: str, mesh: Any) -> TrainStep:
    """Return the AdamW training step of a Llama under a plan, after one step."""
    model = build("llama", layers=4, width=HIDDEN, inner=2 * HIDDEN, heads=4, words=WORDS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    step = autoshard.compile(
        *(model, mesh),
        optimizer=optimizer,
        constraints=PLANS[name](model),
        precision=None,
        options=autoshard.Options(check="off"),
        cluster=LINKED,
    )
    assert isinstance(step, TrainStep)
    step(**words(*SIZES[name], WORDS))
    return step


def programs_of(step: TrainStep) -> tuple[PhasedProgram, PhasedProgram]:
    """Return the program that a step runs, which overlaps communication, and the same program without overlap."""
    program, plan = step.sharded.program, step.plan
    assert program is not None
    assert plan is not None
    return program.phased, lower_prepared(
        program.phased.lowered.traced, plan, options=LoweringOptions(with_overlap=False)
    )


def rig_of(plain: PhasedProgram) -> Rig:
    """Return a rig on which the program's messages take `RATIO` times as long as its products."""
    unit = Rig(1.0, 1.0)
    return Rig(products_s(plain, unit), sum(item.duration_s for item in walk(plain, unit)) / RATIO)


def measured(name: str, rig: Rig) -> list[Transfer]:
    """Return the transfers of one step on this rank, timed by the `WorkClock` of its products."""
    clock = WorkClock(rig.flops_per_s)
    mesh = delayed_mesh({AXIS: 2}, {AXIS: Link(0.0, rig.bandwidth_bytes_per_s)}, clock=clock)
    step = compiled(name, mesh)
    with clock, record_transfers(mesh) as transfers:
        step(**words(*SIZES[name], WORDS, seed=2))
    return transfers


def check(name: str) -> None:
    """Check that a process waits exactly where its program predicts, and hides most hideable communication."""
    made, plain = programs_of(compiled(name, Mesh({AXIS: 2})))
    rig = rig_of(plain)
    said, found = walk(made, rig), measured(name, rig)
    assert [item.sent_bytes for item in said] == [item.sent_bytes for item in found]
    exposed = [
        (mine.name, mine.waited_s, theirs.waited_s)
        for mine, theirs in zip(said, found, strict=True)
        if abs(mine.waited_s - theirs.waited_s) > 1e-6
    ]
    assert not exposed, f"waited for otherwise than the program says: {exposed}"
    assert sum(item.waited_s == 0.0 for item in said) > len(said) / 3
    shares = [share_hidden(plain, walk(item, rig), rig) for item in (plain, made)]
    assert shares[1] >= LEAST > shares[0] + 0.5, shares


CHECKS = {name: partial(check, name) for name in PLANS}

test_what_can_be_hidden_is = on_processes(CHECKS, ranks=2, slow=CHECKS)
