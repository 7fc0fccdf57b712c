"""Gloo processes hide the communication that can be hidden, by a clock that counts products.

The clock makes the waits of a slow network exact. A wait depends only on the order in which a process issues, computes
and waits, and never on the load of the machine.
"""

from __future__ import annotations

from functools import partial

import pytest
from torch import nn

from autoshard.ir.lowered import PhasedProgram
from autoshard.runtime.train_step import TrainStep
from autoshard.testing import Link, Transfer, delayed_mesh, record_transfers
from passes.lowering.lower_program import lower_prepared
from passes.lowering.lowering_options import LoweringOptions
from tests.benchmarks.hidden_cases import AXIS, PLANS, batch, compiled, llama
from tests.end_to_end.work_clock import Rig, WorkClock, products_s, share_hidden, walk
from tests.runtime.processes import report, run_checks

LAYERS, HIDDEN = 4, 256
SIZES = {name: (4, 64) if name == "tensor parallel" else (8, 128) for name in PLANS}
"""Rows and length; of few tokens activations are sent, not weights."""
RATIO, LEAST = 0.4, 0.85
"""Communication's time as a part of the products' time, and the least share of the hideable part to be hidden."""


def model() -> nn.Module:
    return llama(LAYERS, HIDDEN)


def programs_of(step: TrainStep) -> tuple[PhasedProgram, PhasedProgram]:
    """Return the program that a step runs, with overlap and without overlap."""
    program, plan = step.sharded.program, step.plan
    assert program is not None
    assert plan is not None
    return program.phased, lower_prepared(
        program.phased.lowered.traced, plan, options=LoweringOptions(with_overlap=False)
    )


def rig_of(plain: PhasedProgram) -> Rig:
    """Return links on which the program's messages take `RATIO` seconds while its products take one second."""
    unit = Rig(1.0, 1.0)
    return Rig(products_s(plain, unit), sum(item.duration_s for item in walk(plain, unit)) / RATIO)


def measured(name: str, rig: Rig) -> list[Transfer]:
    """Return the transfers of one step on this rank, by the clock of its products."""
    clock = WorkClock(rig.flops_per_s)
    mesh = delayed_mesh({AXIS: 2}, {AXIS: Link(0.0, rig.bandwidth_bytes_per_s)}, clock=clock)
    step = compiled(name, model(), mesh)
    step(**batch(*SIZES[name]))
    with clock, record_transfers(mesh) as transfers:
        step(**batch(*SIZES[name], seed=1))
    return transfers


def check(name: str) -> None:
    """Check that processes wait as the program predicts, and hide most of the hideable communication."""
    simulated = compiled(name, model())
    simulated(**batch(*SIZES[name]))
    made, plain = programs_of(simulated)
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


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_what_can_be_hidden_is(name: str) -> None:
    """Processes wait for each collective as the program's order predicts, and hide 85 % of the hideable time."""
    report(run_checks({name: partial(check, name)}, ranks=2), name)
