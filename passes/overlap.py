"""The passes by which phases communicate while they compute, in their order, and within the peak of memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from autoshard.ir.lowered import PhasedProgram
from passes.lowering.bucket_collectives import MIB, BucketCollectives
from passes.lowering.wait_late import WaitLate
from passes.memory.lowered_memory import peak_bytes

OVERLAP: Sequence[Sequence[Callable[[PhasedProgram], PhasedProgram]]] = (
    (WaitLate(), WaitLate(most_held=2)),
    (BucketCollectives(), BucketCollectives(most_bytes=4 * MIB), BucketCollectives(most_bytes=MIB)),
)
"""The passes, in order; of each line the first with which memory stays below the peak that the phases had, if any."""


def overlapped(
    phased: PhasedProgram, on_pass: Callable[[Any, Any, Any], None] | None = None, micro_batches: int = 1
) -> PhasedProgram:
    """The phases after `OVERLAP`; `on_pass` sees what each pass was given and made."""
    limit = peak_bytes(phased, micro_batches=micro_batches)
    for choices in OVERLAP:
        made = ((rewrite, rewrite(phased)) for rewrite in choices)
        found = next((pair for pair in made if peak_bytes(pair[1], micro_batches=micro_batches) <= limit), None)
        if found is not None:
            if on_pass is not None:
                on_pass(found[0], phased, found[1])
            phased = found[1]
    return phased
