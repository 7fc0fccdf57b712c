"""Check whether a later call may use a program whose trace read values of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from autoshard.errors import TraceError
from autoshard.ir.program import InputKind, Program


def check_guards(program: Program, flat_inputs: Sequence[Tensor], state: Mapping[str, Tensor] | None = None) -> bool:
    """Whether these inputs give the values that Python code read during the trace. If not, the call needs a new trace.

    Args:
        program: a traced program. Its `guard_program` computes the values.
        flat_inputs: the global input tensors, in the order of `program.inputs_of(InputKind.INPUT)`.
        state: parameters, buffers and the seed, by name. Tensors that no guard depends on may be missing.

    Raises:
        TraceError: a guard depends on a parameter, a buffer or the seed that is not in `state`.
    """
    if program.guard_program is None:
        return True
    values = dict(state or {})
    values.update(zip((slot.name for slot in program.inputs_of(InputKind.INPUT)), flat_inputs, strict=True))
    wanted = [slot.name for slot in program.read_by_guards()]
    missing = [name for name in wanted if name not in values]
    if missing:
        raise TraceError(f"The guards of this program depend on {missing}, which `state` does not hold.")
    with torch.no_grad():
        found = program.guard_program(*(values[name] for name in wanted))
    return all(_is(value.item(), guard.value) for value, guard in zip(found, program.guards, strict=True))


def _is(found: bool | int | float, expected: bool | int | float) -> bool:
    """Whether two values are equal. NaN equals NaN."""
    return found == expected or (found != found and expected != expected)
