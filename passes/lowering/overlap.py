"""The passes by which phases communicate while they compute, in their order, and within a limit of memory.

What experts keep, so that it is not sent twice, comes first, as it wins most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from autoshard.ir.lowered import PhasedProgram
from autoshard.ir.plan import Plan
from autoshard.ir.program import InputKind, Program
from cost_models.hardware import Cluster
from cost_models.streams import overlap_of
from passes.lowering.bucket_collectives import MIB, BucketCollectives
from passes.lowering.keep_rows import KeepRows
from passes.lowering.phases import run_passes
from passes.lowering.start_ahead import StartAhead
from passes.lowering.start_soon import StartSoon
from passes.lowering.wait_in_turn import WaitInTurn
from passes.lowering.wait_late import WaitLate
from passes.memory.lowered_memory import peak_bytes

Pass = Callable[[PhasedProgram], PhasedProgram]

APART: Sequence[Pass] = (WaitLate(), StartSoon(), StartAhead(by=None))
"""What brings starts before what they do not need, and waits behind it, so that collectives come together."""

FEWEST = 12 * MIB
"""A rank's piece of a bucket that nothing runs beside. Larger buckets would win little, and a CPU's C library gives
memory of 32 MiB and more back to the system when it is freed, and takes it anew at each step."""

ALONE: Sequence[Sequence[Pass]] = tuple(
    (WaitLate(), StartAhead(by=None), BucketCollectives(None, size, size), StartAhead(), WaitInTurn())
    for size in (FEWEST, FEWEST // 3, FEWEST // 6)
)
"""Rows before `OVERLAP` where nothing runs beside communication: the fewest buckets that memory has room for.

Calls that compute stay in their order, in which they find what they read in the cache.
"""

OVERLAP: Sequence[Sequence[Pass]] = (
    (*APART, BucketCollectives(), StartAhead(), WaitInTurn()),
    (*APART, BucketCollectives(), StartAhead(), WaitInTurn(most_held=2)),
    (*APART, BucketCollectives(most_bytes=2 * MIB), StartAhead(), WaitInTurn(most_held=2)),
    (*APART, BucketCollectives(most_bytes=MIB // 2), StartAhead(), WaitInTurn(most_held=2)),
    (WaitLate(), StartAhead(), WaitInTurn(most_held=2)),
    (WaitLate(), StartAhead(by=0), WaitInTurn(most_held=1)),
)
"""Passes in order: for each phase the first row with which memory stays within the limit, if there is one."""


IN_FLIGHT = 0.05
"""What buckets under way may add to a program's peak, as a share of it, where the memory budget has room for them."""

ALONE_IN_FLIGHT = 0.15
"""The same where nothing runs beside communication. One bucket in place of four saves 1.5 % of the step of a small BERT
on CPUs, and adds 12 % to its peak; DistributedDataParallel, which always holds all gradients, needs a further 6 %."""


def overlapped(
    phased: PhasedProgram,
    on_pass: Callable[[Any, Any, Any], None] | None = None,
    micro_batches: int = 1,
    memory_bytes: float | None = None,
    cluster: Cluster | None = None,
    keeps_rows: bool = True,
) -> PhasedProgram:
    """The phases after `KeepRows`, and rows of `OVERLAP`, or of `ALONE`.

    Args:
        phased: the program.
        on_pass: sees what each pass was given and made.
        micro_batches: how many a step has.
        memory_bytes: the most that each rank may have in use; None: no more than the program has without.
        cluster: where it runs, which decides whether anything runs beside communication; None: it does.
        keeps_rows: let experts keep what came to them; not where a compiler takes sizes for fixed.
    """
    if keeps_rows:
        phased = run_passes((KeepRows(micro_batches, memory_bytes),), phased, on_pass)
    runs_alone = cluster is not None and overlap_of(cluster) is None
    share, rows = (ALONE_IN_FLIGHT, (*ALONE, *OVERLAP)) if runs_alone else (IN_FLIGHT, OVERLAP)
    peak = peak_bytes(phased, micro_batches=micro_batches)
    limit = peak if memory_bytes is None else max(peak, min(memory_bytes, (1 + share) * peak))
    made, left = phased, list(phased.phases)
    known: dict[tuple[Pass, ...], PhasedProgram] = {}
    for row in rows:
        steps = list(_run(row, phased, known))
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


def buckets_of(cluster: Cluster) -> BucketCollectives:
    """The buckets that phases have on a cluster, where memory has room for them."""
    row = (OVERLAP if overlap_of(cluster) is not None else ALONE)[0]
    return next(each for each in row if isinstance(each, BucketCollectives))


def room_of(program: Program, plan: Plan) -> float | None:
    """What a plan's program may have in use on a rank: the budget, without optimizer state that it does not hold."""
    if plan.memory_budget is None or program.inputs_of(InputKind.STATE):
        return plan.memory_budget
    return plan.memory_budget - plan.predicted.memory_breakdown.get("optimizer state", 0)


def _with_phases(phased: PhasedProgram, other: PhasedProgram, names: Sequence[str]) -> PhasedProgram:
    """The program with some phases of another."""
    chosen: dict[str, Any] = {name: other.phases[name] for name in names}
    return replace(phased, **chosen)


def _run(
    passes: Sequence[Pass], phased: PhasedProgram, known: dict[tuple[Pass, ...], PhasedProgram]
) -> Iterator[tuple[Pass, PhasedProgram, PhasedProgram]]:
    """Each pass with what it was given and made; `known` has what rows made that begin with the same passes."""
    for place, rewrite in enumerate(passes, 1):
        done = tuple(passes[:place])
        if done not in known:
            known[done] = rewrite(phased)
        yield rewrite, phased, known[done]
        phased = known[done]
