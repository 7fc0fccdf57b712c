"""Mutations of recomputation, offload, precisions and fused kernels in a program, in the form of `mutations`."""

from __future__ import annotations

import operator
from random import Random
from typing import Any

import torch
from torch import fx

from autoshard.ir.mesh import Mesh
from autoshard.ir.recompute import PHASE
from autoshard.kernels.offload import TRANSFERS, from_host, to_host
from tests.passes.mutations import Mutation, NothingError, alike, choose, is_tensor, local_value, pick

aten = torch.ops.aten

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_SCALES = (aten.mul.Scalar, aten.div.Scalar, aten.mul.Tensor, aten.div.Tensor)
_WORDS = {"silu": "gelu", "gelu": "gelu_tanh", "gelu_tanh": "silu", "tanh": "none", "none": "tanh"}
"""Another value for each word among the arguments of kernels and activations."""


def _is_recomputed(node: fx.Node) -> bool:
    return node.meta.get("phase") == PHASE and is_tensor(node)


def recompute_from_other_input(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Replace an operand of a recomputed value by another value of the same shape and type."""
    order = {node: index for index, node in enumerate(graph.nodes)}

    def others(node: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
        tensors = [item for item in order if is_tensor(item) and order[item] < order[node]]
        operands = [item for item in node.all_input_nodes if is_tensor(item)]
        return [(mine, other) for mine in operands for other in tensors if mine is not other and alike(mine, other)]

    node = pick(graph, random, lambda node: _is_recomputed(node) and bool(others(node)))
    mine, other = choose(random, others(node))
    node.replace_input_with(mine, other)
    return f"{node} is recomputed from {other} for {mine}"


def read_stale_value(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Let a reader of a recomputed value read another value that the forward or a recomputation has computed."""
    node = pick(graph, random, lambda node: _is_recomputed(node) and bool(node.users))
    stale = []
    for item in graph.nodes:
        if item is node:
            break
        if is_tensor(item) and item.meta.get("phase") in ("forward", PHASE) and alike(item, node):
            stale.append(item)
    if not stale:
        raise NothingError
    other = choose(random, stale)
    reader = choose(random, list(node.users))
    reader.replace_input_with(node, other)
    return f"{reader} reads {other} for {node}, which is recomputed"


def fetch_other_copy(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Bring another value back from the host, in place of the due value."""

    def others(node: fx.Node) -> list[fx.Node]:
        copies = [item for item in graph.nodes if item.target is to_host]
        held = [item for item in graph.find_nodes(op="placeholder") if {u.target for u in item.users} == {from_host}]
        return [item for item in (*copies, *held) if item is not node.args[0] and alike(item, node)]

    node = pick(graph, random, lambda node: node.target is from_host and bool(others(node)))
    mine, other = node.args[0], choose(random, others(node))
    node.args = (other,)
    return f"{node} fetches {other} for {mine}"


def copy_other_value(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Copy an older value of the same shape and type to the host."""
    order = {node: index for index, node in enumerate(graph.nodes)}

    def others(node: fx.Node) -> list[fx.Node]:
        mine = node.args[0]
        return [item for item in order if is_tensor(item) and order[item] < order[mine] and alike(item, mine)]  # type: ignore[index]

    node = pick(graph, random, lambda node: node.target is to_host and bool(others(node)))
    mine, other = node.args[0], choose(random, others(node))
    node.args = (other,)
    return f"{node} copies {other} for {mine}"


def skip_transfer(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Remove a copy to or from the host, so that its readers read the value on the wrong side."""
    node = pick(graph, random, lambda node: node.target in TRANSFERS)
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    graph.erase_node(node)
    return f"skipped {node}"


def read_before_made(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Move a copy or a clone in front of its operand."""

    def is_moved(node: fx.Node) -> bool:
        is_again = node.target in TRANSFERS or _is_recomputed(node)
        return is_again and any(operand.op == "call_function" for operand in node.all_input_nodes[:1])

    node = pick(graph, random, is_moved)
    node.all_input_nodes[0].prepend(node)
    return f"{node} stands before {node.all_input_nodes[0]}"


def _casts(node: fx.Node) -> bool:
    return node.target is aten._to_copy.default and local_value(node).is_floating_point()


def drop_cast(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Remove a cast to a floating type."""
    node = pick(graph, random, _casts)
    (operand,) = node.all_input_nodes
    node.replace_all_uses_with(operand)
    graph.erase_node(node)
    return f"dropped the cast {node} of {operand}"


def cast_to_other_type(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Let a cast give another floating type."""
    node = pick(graph, random, _casts)
    other = choose(random, [dtype for dtype in _FLOATS if dtype is not node.kwargs.get("dtype")])
    node.kwargs = {**node.kwargs, "dtype": other}
    return f"{node} casts to {other}"


def drop_loss_scale(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Remove the scale of a scalar loss or gradient: a mean becomes a sum, or a term loses its weight."""

    def scales(node: fx.Node) -> bool:
        operand: Any = node.args[0] if node.args else None
        return node.target in _SCALES and is_tensor(operand) and alike(node, operand) and local_value(node).dim() == 0

    node = pick(graph, random, scales)
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    graph.erase_node(node)
    return f"{node} is left out"


def _is_kernel(node: fx.Node) -> bool:
    return str(node.target).startswith("autoshard.triton_")


def exchange_kernel_operands(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Exchange two operands of a kernel."""

    def pairs(node: fx.Node) -> list[tuple[int, int]]:
        tensors = [index for index, item in enumerate(node.args) if is_tensor(item)]
        return [
            (left, right) for left in tensors for right in tensors
            if left < right and node.args[left] is not node.args[right] and alike(node.args[left], node.args[right])  # type: ignore[arg-type]
        ]  # fmt: skip

    node = pick(graph, random, lambda node: _is_kernel(node) and bool(pairs(node)))
    left, right = choose(random, pairs(node))
    args = list(node.args)
    args[left], args[right] = args[right], args[left]
    node.args = tuple(args)
    return f"{node} with operands {left} and {right} exchanged"


def change_kernel_constant(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Change a number or a word among a kernel's arguments, such as an epsilon, an activation or a flag."""

    def constants(node: fx.Node) -> list[int]:
        return [index for index, item in enumerate(node.args) if isinstance(item, (str, bool, int, float))]

    node = pick(graph, random, lambda node: _is_kernel(node) and bool(constants(node)))
    index = choose(random, constants(node))
    changed = _other(node.args[index], random)
    what = f"{node}: argument {index} is {changed!r} instead of {node.args[index]!r}"
    node.args = (*node.args[:index], changed, *node.args[index + 1 :])
    return what


def _other(item: Any, random: Random) -> Any:
    if isinstance(item, str):
        return _WORDS.get(item, f"not {item}")
    return not item if isinstance(item, bool) else item + random.choice((1, -1))


def exchange_kernel_results(graph: fx.Graph, random: Random, mesh: Mesh) -> str:
    """Read another result of a kernel, of the same shape."""

    def others(node: fx.Node) -> list[int]:
        kernel = node.args[0] if node.target is operator.getitem else None
        if not isinstance(kernel, fx.Node) or not _is_kernel(kernel):
            return []
        mine = local_value(node)
        values = enumerate(kernel.meta["val"])
        return [index for index, value in values if index != node.args[1] and getattr(value, "shape", ()) == mine.shape]

    node = pick(graph, random, lambda node: bool(others(node)))
    index = choose(random, others(node))
    what = f"{node} reads result {index} instead of {node.args[1]}"
    node.args = (node.args[0], index)
    return what


REWRITE_MUTATIONS: tuple[Mutation, ...] = (
    recompute_from_other_input, read_stale_value, fetch_other_copy, copy_other_value, skip_transfer, read_before_made,
    drop_cast, cast_to_other_type, drop_loss_scale,
    exchange_kernel_operands, change_kernel_constant, exchange_kernel_results,
)  # fmt: skip

OFFLOAD_MUTATIONS: tuple[Mutation, ...] = (fetch_other_copy, copy_other_value, skip_transfer)
"""Mutations that only an offloaded program can have."""
