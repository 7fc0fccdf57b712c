"""Matrix products whose operands have unlike types: a device refuses them, and fake tensors let them pass."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from autoshard.errors import TraceError
from autoshard.ir.program import InputSlot, Program

aten = torch.ops.aten

_PRODUCTS = frozenset(
    {
        aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default,
        aten.mv.default, aten.addmv.default, aten.dot.default,
    }
)  # fmt: skip


def refuse_unlike_types(program: Program) -> None:
    """Raise if a matrix product is of unlike types.

    Raises:
        TraceError: it names the operands, the module and its line.
    """
    slots = {slot.node: slot for slot in program.inputs}
    for node in program.graph.nodes:
        if node.target in _PRODUCTS and len({_dtype(operand) for operand in node.all_input_nodes}) > 1:
            raise TraceError(_message(node, slots))


def _message(node: fx.Node, slots: Mapping[str, InputSlot]) -> str:
    operands = " and ".join(f"{_named(operand, slots)} of {_dtype(operand)}" for operand in node.all_input_nodes)
    module, source = node.meta.get("module"), node.meta.get("source")
    where = (f" of {module!r}" if module else "") + (f" at {source}" if source else "")
    return (
        f"The matrix product {node.target}{where} takes {operands}: one device refuses operands of unlike types. "
        "Give inputs of the type of the parameters, or cast in the model (x.to(weight.dtype))."
    )


def _named(node: fx.Node, slots: Mapping[str, InputSlot]) -> str:
    """What an operand is, behind views and all else that is computed of it alone in its type."""
    found = node
    while (
        found.name not in slots and len(found.all_input_nodes) == 1 and _dtype(found.all_input_nodes[0]) == _dtype(node)
    ):
        found = found.all_input_nodes[0]
    if found.name not in slots:
        return f"the value {node.name!r}"
    slot = slots[found.name]
    return f"{slot.kind} {slot.name!r}"


def _dtype(node: fx.Node) -> torch.dtype | None:
    return getattr(node.meta.get("val"), "dtype", None)
