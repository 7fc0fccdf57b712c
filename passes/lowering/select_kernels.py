"""Let torch's fused kernels run semantic operators.

Before → after: `autoshard.attention(...)` → `autoshard.native_attention(...)`, and so for every operator of
`autoshard.kernels.native`. Arguments and results stay; `verify_phases` reads the one for the other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from autoshard.ir.lowered import PhasedProgram
from autoshard.kernels.native import NATIVE
from passes.preparation.rewriting import with_targets


@dataclass(frozen=True, slots=True)
class SelectKernels:
    """See the module's docstring."""

    def __call__(self, phased: PhasedProgram) -> PhasedProgram:
        """The phases on fused kernels; the lowered program as a whole stays as it is, for verification."""
        selected: dict[str, Any] = {name: with_targets(phase, NATIVE) for name, phase in phased.phases.items()}
        return replace(phased, **selected)
