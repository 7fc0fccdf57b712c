"""Bring a program into the form that planning expects.

1. Split products with a bias: `addmm(bias, a, b)` → `add(mm(a, b), bias)`. Partial products are then reduced before the
   bias is added.
2. Repeat views in the backward: if the backward uses a view of the forward, it gets a copy of the view. Saved values
   then always own their memory, and `t(w)` is recomputed from `w` at no cost.
3. Remove nodes without users.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from autoshard.graphs.copy_nodes import copy_node
from autoshard.ir.program import Program
from passes.preparation.rewriting import copy_program, insert_call, replace_slot_node

aten = torch.ops.aten

_COPYING_VIEWS = frozenset({aten._unsafe_view.default})


def is_view(node: fx.Node) -> bool:
    """Whether a node's result shares the memory of its first operand."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if target in _COPYING_VIEWS:
        return True
    returns = target._schema.returns
    return bool(returns) and all(item.alias_info is not None and not item.alias_info.is_write for item in returns)


@dataclass(frozen=True, slots=True)
class Canonicalize:
    """Split addmm, repeat views in the backward, and remove unused nodes."""

    def __call__(self, program: Program) -> Program:
        program = copy_program(program)
        program = _split_addmm(program)
        _repeat_views_in_backward(program)
        program.graph.eliminate_dead_code()
        program.graph_module.recompile()
        return program


def _split_addmm(program: Program) -> Program:
    graph = program.graph
    for node in list(graph.nodes):
        if node.target is not aten.addmm.default or node.kwargs:
            continue
        bias, left, right = node.args
        with graph.inserting_before(node):
            product = insert_call(graph, aten.mm.default, (left, right), like=node)
            total = insert_call(graph, aten.add.Tensor, (product, bias), like=node)
        node.replace_all_uses_with(total)
        program = replace_slot_node(program, node.name, total.name)
        graph.erase_node(node)
    return program


def _repeat_views_in_backward(program: Program) -> None:
    graph = program.graph
    repeated: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op == "call_function" and node.meta["phase"] == "backward":
            with graph.inserting_before(node):
                for operand in node.all_input_nodes:
                    if _is_forward_view(operand):
                        node.replace_input_with(operand, _repeat(graph, operand, node, repeated))


def _is_forward_view(node: fx.Node) -> bool:
    return node.op == "call_function" and node.meta["phase"] == "forward" and is_view(node) and _has_one_result(node)


def _has_one_result(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _repeat(graph: fx.Graph, view: fx.Node, user: fx.Node, repeated: dict[fx.Node, fx.Node]) -> fx.Node:
    """Return the backward's copy of a view of the forward, and make it if it is not in `repeated`.

    Views that `view` reads are copied too. The copies stand before `user`, the first call of the backward that uses
    them.
    """
    if view in repeated:
        return repeated[view]
    operands = {
        operand: _repeat(graph, operand, user, repeated) if _is_forward_view(operand) else operand
        for operand in view.all_input_nodes
    }
    copied = copy_node(graph, view, lambda operand: operands[operand])
    copied.meta = {**view.meta, "phase": "backward"}
    repeated[view] = copied
    return copied
