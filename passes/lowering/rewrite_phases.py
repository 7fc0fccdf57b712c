"""What passes over phased programs share: the same rewrite of each phase."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import fx

from autoshard.ir.lowered import PhasedProgram


def rewrite_phases(phased: PhasedProgram, rewrite: Callable[[fx.GraphModule], fx.GraphModule]) -> PhasedProgram:
    """The program with every phase rewritten; the lowered program as a whole stays as it is, for verification."""
    rewritten: dict[str, Any] = {name: rewrite(phase) for name, phase in phased.phases.items()}
    return replace(phased, **rewritten)
