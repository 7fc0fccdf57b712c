"""What passes over phased programs share: the same rewrite of each phase."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import fx

from autoshard.ir.lowered import PhasedProgram


def rewrite_phases(phased: PhasedProgram, rewrite: Callable[[fx.GraphModule], fx.GraphModule]) -> PhasedProgram:
    """The program with every phase rewritten; the lowered program as a whole stays as it is, for verification."""
    update = phased.update
    return replace(
        phased,
        forward=rewrite(phased.forward),
        backward=rewrite(phased.backward),
        update=None if update is None else rewrite(update),
    )
