"""Numbers the calls that save rows of experts for the backward, for a joint program that saves none.

A phase may call `exchanged_experts_keeping` where the joint program calls `exchanged_experts` on the same operands. Its
first result has the joint call's number. The three other results get new numbers. The backward may take these three, in
their places only, where the joint program's call has their tokens. It then has the joint call's number.
"""

from __future__ import annotations

import operator

from torch import fx

import autoshard.kernels as kernels
from passes.preparation.number_values import DICT, LIST, LITERAL, OPERAND, Key, Numbering

_KEPT = ("rows", "u", "counts")


def number_kept(joint: Numbering) -> None:
    """Add the numbers, and the names of the saved values: `experts_kept_rows` of a call `experts`."""
    graph, kept = fx.Graph(), dict[Key, list[Key]]()

    def add(name: str, key: Key) -> int:
        return joint.add(graph.create_node("placeholder", name, name=name), key)

    for node in [node for node in joint.numbers if node.target is kernels.exchanged_experts]:
        number = joint.numbers[node]
        kind, _, args, kwargs = joint.key_of(number)
        call = add(f"{node.name}_keeping", (kind, kernels.exchanged_experts_keeping, args, kwargs))
        joint.keys[_result(call, 0)] = number
        kept[args[1:]] = [
            (OPERAND, add(f"{node.name}_kept_{word}", _result(call, place))) for place, word in enumerate(_KEPT, 1)
        ]
    for number, node in enumerate(joint.nodes if kept else ()):
        if node.target is kernels.exchanged_experts_backward:
            kind, _, args, kwargs = joint.key_of(number)
            if args[2:] in kept:
                taken = (LIST, args[1], *args[3:8], *kept[args[2:]], *args[8:])
                joint.keys[kind, kernels.exchanged_experts_kept_backward, taken, kwargs] = number


def _result(call: int, place: int) -> Key:
    return ("call_function", operator.getitem, (LIST, (OPERAND, call), (LITERAL, int, place)), (DICT,))
