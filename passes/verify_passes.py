"""Verify each pass of lowering right after it ran, so that a fault is blamed on its author.

What a whole compile is checked by (`verify_preparation`, `verify_program`, `verify_phases`) is asked of the one step: a
program that is prepared must compute what it did before the pass, a lowered one what the program does, phases what the
lowered one does. `AUTOSHARD_VERIFY=each-pass` turns it on.
"""

from __future__ import annotations

from typing import Any

from autoshard.errors import VerificationError
from autoshard.ir.lowered import LoweredProgram, PhasedProgram
from autoshard.ir.program import Program
from passes.verify_phases import verify_phases
from passes.verify_preparation import verify_preparation
from passes.verify_program import verify_program


def verify_pass(rewrite: Any, before: Any, after: Any) -> None:
    """Prove that what a pass made computes what it was given; see `passes.pipeline.OnPass`.

    Raises:
        VerificationError: it does not; the message names the pass.
    """
    try:
        _verify(before, after)
    except VerificationError as error:
        raise VerificationError(
            f"{type(rewrite).__module__} made another program of what it was given: {error}"
        ) from error


def _verify(before: Any, after: Any) -> None:
    match after:
        case Program():
            verify_preparation(before, after)
        case LoweredProgram():
            verify_program(before if isinstance(before, Program) else before.traced, after)
        case PhasedProgram():
            verify_phases(after)
        case _:
            raise TypeError(f"passes make programs; found {type(after).__name__}")
