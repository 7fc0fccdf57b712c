"""Runs semantic operators by torch's fused kernels.

A semantic operator is an operator of ours for a whole computation, such as attention. Before → after:
`autoshard.attention(...)` → `autoshard.native_attention(...)`, and likewise for every operator of
`autoshard.kernels.native`. Arguments and results stay. `passes.verification.verify_phases` treats both operators as
equal.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.ir.lowered import PhasedProgram
from autoshard.kernels.native import NATIVE
from passes.lowering.rewrite_phases import rewrite_phases
from passes.preparation.rewriting import with_targets


@dataclass(frozen=True, slots=True)
class SelectKernels:
    """Replaces operators of ours, such as `autoshard.attention`, by operators that run torch's fused kernels."""

    def __call__(self, phased: PhasedProgram) -> PhasedProgram:
        return rewrite_phases(phased, lambda phase: with_targets(phase, NATIVE))
