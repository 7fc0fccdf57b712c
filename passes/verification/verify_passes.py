"""Verifies each pass of lowering right after it ran, so that an error is attributed to its pass.

`AUTOSHARD_VERIFY=each-pass` turns this on. The checks that verify a whole compile are applied to the input and the
result of one pass:

* a prepared program must have the results of the pass's input (`verify_preparation`);
* a lowered program must have the results of the prepared program (`verify_program`);
* a program with kernels must have the results of the program without kernels, once its kernels are expanded;
* phases must have the results of the uncut lowered program (`verify_phases`, `verify_cut_backward`).
"""

from __future__ import annotations

import os
from typing import Any

from autoshard.errors import NotAvailableError, VerificationError
from autoshard.ir.lowered import LoweredProgram, PhasedProgram
from autoshard.ir.program import Program
from passes.preparation.number_values import Numbering
from passes.verification.verify_cut_backward import verify_cut_backward
from passes.verification.verify_phases import results_of, verify_phases
from passes.verification.verify_preparation import verify_preparation
from passes.verification.verify_program import verify_program


def verify_pass(rewrite: Any, before: Any, after: Any) -> None:
    """Prove that the pass `rewrite` preserved the results of `before`. This function can be `LoweringOptions.on_pass`.

    Raises:
        VerificationError: the results differ. The message names the pass.
    """
    try:
        _verify(before, after)
    except VerificationError as error:
        raise VerificationError(f"{type(rewrite).__module__} changed the results of its program. {error}") from error


def _verify(before: Any, after: Any) -> None:
    match after:
        case Program():
            verify_preparation(before, after)
        case LoweredProgram() if isinstance(before, Program):
            verify_program(before, after)
        case LoweredProgram():
            _verify_kernels(before, after)
        case PhasedProgram():
            verify_phases(after)
            verify_cut_backward(after)
        case _:
            raise TypeError(f"passes make programs; found {type(after).__name__}")


def _verify_kernels(before: LoweredProgram, after: LoweredProgram) -> None:
    from passes.verification.expand_kernels import (
        expand_kernels,  # triton is imported only for a program with kernels
    )

    numbering = Numbering()
    numbering.add_graph(before.graph_module)
    expected = [numbering.numbers[node] for node in results_of(before.graph_module)]
    numbering.restart_draws()
    expanded = expand_kernels(after.graph_module)
    numbering.add_graph(expanded, commuted=True)
    found = [numbering.numbers[node] for node in results_of(expanded)]
    if found != expected:
        wrong = [index for index, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1]]
        raise VerificationError(f"results {wrong} are other values than without kernels.")


def verifies_each_pass() -> bool:
    """Whether the environment variable AUTOSHARD_VERIFY requests a check after each pass of lowering.

    Raises:
        NotAvailableError: the variable has an unknown value.
    """
    asked = os.environ.get("AUTOSHARD_VERIFY", "")
    if asked not in ("", "each-pass"):
        raise NotAvailableError(f"AUTOSHARD_VERIFY={asked!r} is unknown; set it to 'each-pass', or leave it out.")
    return bool(asked)
