"""Raises `TraceError` for operand types that a device does not accept, although fake tensors do.

Examples are a product of float32 and bfloat16, and a softmax of integers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

import autoshard.kernels  # noqa: F401  (defines the operators)
from autoshard.errors import TraceError
from autoshard.ir.program import InputSlot, Program

aten, ours = torch.ops.aten, torch.ops.autoshard

_PRODUCTS = frozenset(
    {
        aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default,
        aten.mv.default, aten.addmv.default, aten.dot.default,
    }
)  # fmt: skip
"""Matrix products, whose operands must all have the same dtype."""

_OF_ONE_TYPE: Mapping[object, tuple[int, ...]] = {aten.convolution.default: (0, 1, 2), aten.index_add.default: (0, 3)}
"""Further operator → positions of the arguments that must all have the same dtype."""

FLOATING = frozenset(
    {
        aten.gelu.default, aten.silu.default, aten.mish.default, aten.hardswish.default, aten.hardsigmoid.default,
        aten.softplus.default, aten.elu.default, aten.glu.default, aten.log_sigmoid_forward.default,
        aten._softmax.default, aten._log_softmax.default, aten.var.correction, aten.std.correction,
        aten.var_mean.correction, aten.lerp.Scalar, aten.lerp.Tensor,
        ours.dropout.default, ours.attention.default, ours.cross_entropy.default,
    }
)  # fmt: skip
"""Operators whose first operand must be floating-point."""


def refuse_types(program: Program) -> None:
    """Raise `TraceError` if an operator gets operands of dtypes that it does not accept on a device.

    The message names operands, module and source line.
    """
    slots = {slot.node: slot for slot in program.inputs}
    for node in program.graph.nodes:
        operands = _of_one_type(node)
        if len({_dtype(operand) for operand in operands}) > 1:
            kind = "matrix product" if node.target in _PRODUCTS else "operator"
            raise TraceError(_message(node, operands, slots, kind, "one device refuses operands of unlike types"))
        if node.target in FLOATING and not _is_floating(node.args[0]):
            said = "one device computes it of floating point numbers only"
            raise TraceError(_message(node, node.args[:1], slots, "operator", said))


def _of_one_type(node: fx.Node) -> Sequence[fx.Node]:
    if node.target in _PRODUCTS:
        return node.all_input_nodes
    operands = [node.args[place] for place in _OF_ONE_TYPE.get(node.target, ())]
    return [operand for operand in operands if isinstance(operand, fx.Node)]


def _message(node: fx.Node, operands: Sequence[fx.Node], slots: Mapping[str, InputSlot], kind: str, said: str) -> str:
    named = " and ".join(f"{_named(operand, slots)} of {_dtype(operand)}" for operand in operands)
    module, source = node.meta.get("module"), node.meta.get("source")
    where = (f" of {module!r}" if module else "") + (f" at {source}" if source else "")
    return (
        f"The {kind} {node.target}{where} takes {named}: {said}. "
        "Give inputs of the type of the parameters, or cast in the model (x.to(weight.dtype))."
    )


def _named(node: fx.Node, slots: Mapping[str, InputSlot]) -> str:
    """Return an operand's name for messages: the input of which it is a view, or the operator that computes it."""
    found = node
    while (
        found.name not in slots and len(found.all_input_nodes) == 1 and _dtype(found.all_input_nodes[0]) == _dtype(node)
    ):
        found = found.all_input_nodes[0]
    if found.name not in slots:
        source = node.meta.get("source")
        return f"the result of {node.target}" + (f" at {source}" if source else "")
    slot = slots[found.name]
    return f"{slot.kind} {slot.name!r}"


def _is_floating(node: fx.Node) -> bool:
    dtype = _dtype(node)
    return dtype is None or dtype.is_floating_point or dtype.is_complex


def _dtype(node: fx.Node) -> torch.dtype | None:
    return getattr(node.meta.get("val"), "dtype", None)
