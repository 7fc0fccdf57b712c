"""Overlaps communication with computation in all phases, within a memory limit.

Collectives under way hold memory. `passes.lowering.in_flight` lists limits on them, the loosest limits first. The
passes of `Moment.IN_FLIGHT` run with each of these limits in turn. Each phase of the result comes from the first limits
with which the program's peak memory fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from autoshard.ir.lowered import PhasedProgram
from passes.lowering.in_flight import limits_on
from passes.lowering.lowering_options import USUAL, LoweringOptions
from passes.lowering.order import Moment, Pass, passes_at
from passes.memory.lowered_memory import peak_bytes


def overlapped(phased: PhasedProgram, options: LoweringOptions = USUAL) -> PhasedProgram:
    """Return the program with overlapping collectives.

    A phase is unchanged if the program fits in memory with none of the limits.
    """
    limits, share = limits_on(options.cluster)
    peak = peak_bytes(phased, options.micro_batches, options.load)
    most = peak if options.memory_bytes is None else max(peak, min(options.memory_bytes, (1 + share) * peak))
    made, left = phased, list(phased.phases)
    known: dict[tuple[Pass, ...], PhasedProgram] = {}
    for in_flight in limits:
        passes = passes_at(Moment.IN_FLIGHT, replace(options, in_flight=in_flight))
        steps = list(_run(passes, phased, known))
        fitting = _fitting(
            phased, steps[-1][-1], left, lambda one: peak_bytes(one, options.micro_batches, options.load) <= most
        )
        if fitting and options.on_pass is not None:
            for step in steps:
                options.on_pass(*step)
        made = _with_phases(made, steps[-1][-1], fitting)
        left = [name for name in left if name not in fitting]
        if not left:
            break
    return made


def _fitting(
    phased: PhasedProgram, other: PhasedProgram, names: Sequence[str], fits: Callable[[PhasedProgram], bool]
) -> list[str]:
    """Return the names of the phases of `phased` to replace by the phases of `other`, among `names`.

    All of them are returned if the program then fits in memory. Otherwise each phase is tried alone.
    """
    if fits(_with_phases(phased, other, names)):
        return list(names)
    return [name for name in names if fits(_with_phases(phased, other, [name]))]


def _with_phases(phased: PhasedProgram, other: PhasedProgram, names: Sequence[str]) -> PhasedProgram:
    chosen: dict[str, Any] = {name: other.phases[name] for name in names}
    return replace(phased, **chosen)


def _run(
    passes: Sequence[Pass], phased: PhasedProgram, known: dict[tuple[Pass, ...], PhasedProgram]
) -> Iterator[tuple[Pass, PhasedProgram, PhasedProgram]]:
    """Run passes in order, and yield each pass with its input and its result.

    `known` is a cache: the result of each sequence of passes that has run already.
    """
    for place, rewrite in enumerate(passes, 1):
        done = tuple(passes[:place])
        if done not in known:
            known[done] = rewrite(phased)
        yield rewrite, phased, known[done]
        phased = known[done]
