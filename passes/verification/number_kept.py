"""Number the calls of expert layers that save their received rows, so that they equal layers which do not save rows.

`passes.lowering.keep_rows` replaces `exchanged_experts` by `exchanged_experts_keeping` in the forward. This call has
three further results (saved rows, first products, counts), which the backward's call takes in place of the tokens. The
uncut program has neither call. With the added value numbers, the new calls equal the old calls on the same operands.
The backward must take the three saved values in their order.
"""

from __future__ import annotations

import operator

from torch import fx

import autoshard.kernels as kernels
from passes.preparation.number_values import DICT, LIST, LITERAL, OPERAND, Key, Numbering

_KEPT = ("rows", "u", "counts")


def number_kept(joint: Numbering) -> None:
    """Add the value numbers of calls that save rows to `joint`, the value numbers of the uncut program.

    The calls get the numbers of the calls that they replace. Saved values get names such as `experts_kept_rows`.
    """
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
