"""The passes by which phases communicate while they compute, in their order, and within the peak of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from autoshard.ir.lowered import PhasedProgram
from passes.lowering.bucket_collectives import MIB, BucketCollectives
from passes.lowering.start_ahead import StartAhead
from passes.lowering.start_soon import StartSoon
from passes.lowering.wait_in_turn import WaitInTurn
from passes.lowering.wait_late import WaitLate
from passes.memory.lowered_memory import peak_bytes

Pass = Callable[[PhasedProgram], PhasedProgram]

APART: Sequence[Pass] = (WaitLate(), StartSoon(), StartAhead(by=None))
"""What brings starts before what they do not need, and waits behind it, so that collectives come together."""

OVERLAP: Sequence[Sequence[Pass]] = (
    (*APART, BucketCollectives(), StartAhead(), WaitInTurn()),
    (*APART, BucketCollectives(), StartAhead(), WaitInTurn(most_held=2)),
    (*APART, BucketCollectives(most_bytes=4 * MIB), StartAhead(), WaitInTurn(most_held=2)),
    (*APART, BucketCollectives(most_bytes=MIB), StartAhead(), WaitInTurn(most_held=2)),
    (WaitLate(), StartAhead(), WaitInTurn(most_held=2)),
    (WaitLate(), StartAhead(by=0), WaitInTurn(most_held=1)),
)
"""Passes in order: for each phase the first row with which memory stays within the program's peak, if there is one."""


def overlapped(
    phased: PhasedProgram, on_pass: Callable[[Any, Any, Any], None] | None = None, micro_batches: int = 1
) -> PhasedProgram:
    """The phases after rows of `OVERLAP`; `on_pass` sees what each pass was given and made."""
    limit = peak_bytes(phased, micro_batches=micro_batches)
    made, left = phased, list(phased.phases)
    for row in OVERLAP:
        steps = list(_run(row, phased))
        tried = {name: _with_phases(phased, steps[-1][-1], [name]) for name in left}
        fitting = [name for name in left if peak_bytes(tried[name], micro_batches=micro_batches) <= limit]
        if fitting and on_pass is not None:
            for step in steps:
                on_pass(*step)
        made = _with_phases(made, steps[-1][-1], fitting)
        left = [name for name in left if name not in fitting]
        if not left:
            break
    return made


def _with_phases(phased: PhasedProgram, other: PhasedProgram, names: Sequence[str]) -> PhasedProgram:
    """The program with some phases of another."""
    chosen: dict[str, Any] = {name: other.phases[name] for name in names}
    return replace(phased, **chosen)


def _run(passes: Sequence[Pass], phased: PhasedProgram) -> Iterator[tuple[Pass, PhasedProgram, PhasedProgram]]:
    """Each pass with what it was given and made."""
    for rewrite in passes:
        made = rewrite(phased)
        yield rewrite, phased, made
        phased = made
