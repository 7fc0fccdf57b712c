"""The phases of a lowered program, cut, hoisted and on kernels; and running passes in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from autoshard.ir.lowered import LoweredProgram, PhasedProgram
from cost_models.hardware import Cluster
from passes.lowering.hoist import Hoist
from passes.lowering.split_phases import SplitPhases

OnPass = Callable[[Any, Any, Any], None]
"""Called after each pass with the pass, what it was given, and what it made."""


def run_passes(passes: Sequence[Callable[[Any], Any]], program: Any, on_pass: OnPass | None = None) -> Any:
    """What passes make of a program, one after the other."""
    for rewrite in passes:
        made = rewrite(program)
        if on_pass is not None:
            on_pass(rewrite, program, made)
        program = made
    return program


def phases_of(
    lowered: LoweredProgram,
    cluster: Cluster | None,
    first: tuple[SplitPhases, Hoist],
    last: Sequence[Callable[[PhasedProgram], PhasedProgram]],
    with_kernels: bool,
    with_generated: bool,
    on_pass: OnPass | None,
) -> PhasedProgram:
    """The phases of a lowered program, with the kernels that they run on."""
    if not with_kernels:
        return run_passes((*first, *last), lowered, on_pass)
    from passes.lowering.fuse_kernels import FuseKernels
    from passes.lowering.generate_kernels import GenerateKernels

    split, hoist = first
    fused = run_passes((FuseKernels(),), lowered, on_pass)
    phased = replace(split(fused), lowered=lowered)
    if on_pass is not None:
        on_pass(split, fused, phased)
    generated = (GenerateKernels(None if cluster is None else cluster.device),) if with_generated else ()
    return run_passes((hoist, *generated, *last), phased, on_pass)
