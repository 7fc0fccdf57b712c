"""Operands whose memory the results of a call may share, so that a write to a result changes the operand.

An operator's schema says which results are views. Some operators return an operand or a view of it although their
schema does not say so. This file lists these operators, and a test compares the list with runs of torch's operators.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import fx

_MAY_RETURN_OPERANDS = frozenset({
    "_c10d_functional.wait_tensor.default", "_to_cpu", "_unsafe_view", "alpha_dropout", "atleast_1d", "atleast_2d",
    "atleast_3d", "broadcast_tensors", "conj_physical", "contiguous", "cumprod_backward", "data", "dequantize",
    "dropout", "einsum", "feature_alpha_dropout", "feature_dropout", "flatten_dense_tensors", "lift", "lift_fresh",
    "meshgrid", "set", "sum_to_size", "to_dense", "to_dense_backward", "to_mkldnn_backward", "type_as",
    "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes", "_cast_Byte", "_cast_Char", "_cast_Double",
    "_cast_Float", "_cast_Half", "_cast_Int", "_cast_Long", "_cast_Short", "_saturate_weight_to_fp16",
})  # fmt: skip
"""Operators that may return an operand although their schema does not say so.

An aten operator is named by its overload packet, such as "dropout". Other operators have their full names.
"""


def aliased_operands(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the operands of `node` whose memory its results may share; for a plain Python function, all operands.

    Example:
        >>> graph = fx.Graph()
        >>> x, y = graph.placeholder("x"), graph.placeholder("y")
        >>> aliased_operands(graph.call_function(torch.ops.aten.view.default, (x, [-1])))
        (x,)
        >>> aliased_operands(graph.call_function(torch.ops.aten.add.Tensor, (x, y)))
        ()
    """
    if node.op != "call_function":
        return ()
    if not isinstance(node.target, torch._ops.OpOverload) or _returns_operands(node.target):
        return tuple(node.all_input_nodes)
    return _annotated(node, node.target)


@cache
def _returns_operands(target: torch._ops.OpOverload) -> bool:
    packet = str(target.overloadpacket).removeprefix("aten.")
    return packet in _MAY_RETURN_OPERANDS or str(target) in _MAY_RETURN_OPERANDS


def _annotated(node: fx.Node, target: torch._ops.OpOverload) -> tuple[fx.Node, ...]:
    found: dict[fx.Node, None] = {}
    for position, name in _aliased_arguments(target):
        given = node.args[position] if position < len(node.args) else node.kwargs.get(name)
        fx.map_arg(given, lambda operand: found.setdefault(operand))
    return tuple(found)


@cache
def _aliased_arguments(target: torch._ops.OpOverload) -> tuple[tuple[int, str], ...]:
    """Return position and name of each argument whose memory a result may share, according to the schema."""
    if not any(item.alias_info is not None for item in target._schema.returns):
        return ()
    arguments = enumerate(target._schema.arguments)
    return tuple((place, argument.name) for place, argument in arguments if argument.alias_info is not None)
