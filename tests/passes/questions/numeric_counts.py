"""Counts of FLOPs, bytes and elements on traced and lowered programs, with which formulas are compared."""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from typing import Any

import torch
from torch import fx

from autoshard.ir.lowered import PhasedProgram
from autoshard.ir.program import InputKind, OutputKind, Program
from cost_models.operators import seems_to_contract, work
from cost_models.work import Kind, TensorInfo
from passes.preparation.canonicalize import is_view
from passes.strategies.operator_names import dtype_name, operator_name


def flops(graph: fx.Graph) -> float:
    """FLOPs of products and attention of a graph, traced or lowered."""
    total = 0.0
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            values: list[fx.Node] = []
            fx.map_arg((node.args, node.kwargs), values.append)
            inputs = [_info(item.meta["val"]) for item in values if isinstance(item.meta.get("val"), torch.Tensor)]
            outputs = [_info(item) for item in _results(node)]
            name = operator_name(node)
            if not inputs or name.startswith("_c10d") or seems_to_contract(name):
                continue
            done = work(name, inputs, outputs, tuple(fx.map_arg(node.args, lambda argument: None)))
            if done.products or done.kind is Kind.ATTENTION:
                total += done.flops
    return total


def sent_bytes(phased: PhasedProgram) -> dict[str, float]:
    """Bytes that each rank sends in the collectives of a program by ring algorithms, for each mesh axis."""
    sent: dict[str, float] = defaultdict(float)
    mesh = phased.lowered.mesh
    for node in phased.lowered.graph_module.graph.nodes:
        name = str(node.target)
        if not name.startswith("_c10d_functional.") or "wait" in name:
            continue
        axis = str(node.args[-1])
        ranks, operand = mesh.axis_size(axis), _bytes(node.args[0].meta["val"])
        sent[axis] += {
            "_c10d_functional.all_gather_into_tensor.default": (ranks - 1) * operand,
            "_c10d_functional.reduce_scatter_tensor.default": (ranks - 1) * operand / ranks,
            "_c10d_functional.all_reduce.default": 2 * (ranks - 1) * operand / ranks,
            "_c10d_functional.all_to_all_single.default": (ranks - 1) * operand / ranks,
        }[name]
    return dict(sent)


def saved_bytes(phased: PhasedProgram) -> int:
    """Return the bytes that the forward saves for the backward, without inputs. Each storage counts once."""
    nodes = {node.name: node for node in phased.lowered.graph_module.graph.nodes}
    owners: dict[fx.Node, None] = {}
    for name in phased.saved:
        node = nodes[name]
        while _views(node):
            node = node.all_input_nodes[0]
        if node.op == "call_function":
            owners[node] = None
    return sum(_bytes(node.meta["val"]) for node in owners)


def gradient_bytes(phased: PhasedProgram) -> int:
    """Bytes of gradients of parameters on each rank."""
    slots = phased.lowered.outputs
    return sum(
        math.prod(item.spec.local_shape(item.shape, phased.lowered.mesh)) * item.dtype.itemsize
        for item in slots
        if item.slot.kind == OutputKind.GRADIENT
    )


def parameter_bytes(phased: PhasedProgram) -> int:
    """Bytes of parameters on each rank."""
    return sum(
        math.prod(item.spec.local_shape(item.shape, phased.lowered.mesh)) * item.dtype.itemsize
        for item in phased.lowered.inputs
        if item.slot.kind == InputKind.PARAMETER
    )


def parameters(program: Program) -> int:
    """Number of elements of all parameters."""
    nodes = program.nodes_by_name()
    return sum(nodes[slot.node].meta["val"].numel() for slot in program.inputs_of(InputKind.PARAMETER))


def _views(node: fx.Node) -> bool:
    """Whether a node's result is a view of its operand, or a waited result."""
    if node.target is operator.getitem:
        return _views(node.all_input_nodes[0])
    return node.op == "call_function" and (
        is_view(node) or node.target is torch.ops._c10d_functional.wait_tensor.default
    )


def _results(node: fx.Node) -> list[torch.Tensor]:
    value: Any = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    return [item for item in values if isinstance(item, torch.Tensor)]


def _info(value: torch.Tensor) -> TensorInfo:
    return TensorInfo(tuple(value.shape), value.dtype.itemsize, dtype_name(value.dtype))


def _bytes(value: torch.Tensor) -> int:
    return value.numel() * value.dtype.itemsize
