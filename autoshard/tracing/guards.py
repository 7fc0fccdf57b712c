"""Checks that a later call may use a program whose trace relied on values of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from autoshard.errors import TraceError
from autoshard.ir.program import InputKind, Program


def check_guards(program: Program, flat_inputs: Sequence[Tensor], state: Mapping[str, Tensor] | None = None) -> bool:
    """Whether the values that the trace relied on are the same for other inputs.

    Args:
        program: a traced program.
        flat_inputs: the global input tensors, in the order of `program.inputs_of(InputKind.INPUT)`.
        state: parameters and buffers by name; needed only where a guard depends on them.

    Returns:
        True when the program computes what the model would; False when it must be traced anew.

    Raises:
        TraceError: a guard depends on a parameter or buffer that is not in `state`.
    """
    if program.guard_program is None:
        return True
    values = dict(state or {})
    values.update(zip((slot.name for slot in program.inputs_of(InputKind.INPUT)), flat_inputs, strict=True))
    names = {slot.node: slot.name for slot in program.inputs}
    wanted = [names[node.target] for node in program.guard_program.graph.nodes if node.op == "placeholder"]
    missing = [name for name in wanted if name not in values]
    if missing:
        raise TraceError(f"The guards of this program depend on {missing}, which `state` does not hold.")
    with torch.no_grad():
        found = program.guard_program(*(values[name] for name in wanted))
    return all(bool(value.item() == guard.value) for value, guard in zip(found, program.guards, strict=True))
