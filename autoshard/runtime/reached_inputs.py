"""Find the inputs of a program that no backward reaches, such as parameters of a module that a call leaves out.

Autograd calls hooks on each input of a node, with None if the input gets no gradient. On one device, hooks on a
parameter that a call leaves out are not called.
"""

from __future__ import annotations

from autoshard.ir.program import OWNERS, InputKind, OutputKind, Program

_GRADIENTS = (OutputKind.GRADIENT, OutputKind.INPUT_GRADIENT)


def inputs_without_gradient(program: Program) -> frozenset[tuple[InputKind, str]]:
    """Return kind and name of the inputs that get no gradient, whichever output a backward starts from.

    An output without a tangent may start a backward too, which then runs another program.
    """
    tangents = {slot.name for slot in program.inputs_of(InputKind.TANGENT)}
    nodes = program.nodes_by_name()
    waiting = [
        nodes[slot.node]
        for slot in program.outputs_of(OutputKind.OUTPUT)
        if not slot.detached and slot.name.replace("output:", "tangent:") not in tangents
    ]
    behind = set(waiting)
    while waiting:
        more = [node for node in waiting.pop().all_input_nodes if node not in behind]
        behind.update(more)
        waiting += more
    reached = {(OWNERS[slot.kind], slot.name) for slot in program.outputs if slot.kind in _GRADIENTS}
    return frozenset(
        (slot.kind, slot.name)
        for slot in program.inputs
        if (slot.kind, slot.name) not in reached and nodes[slot.node] not in behind
    )
