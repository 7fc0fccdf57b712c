"""Helpers of passes that rewrite a program's graph: copying the graph, and adding nodes with full metadata."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from torch import fx

from autoshard.graphs.copy_nodes import copied
from autoshard.graphs.lazy_module import lazy_module
from autoshard.ir.collectives import is_collective
from autoshard.ir.program import Program

_INHERITED = ("phase", "module", "source")


def copy_program(program: Program) -> Program:
    """Return a copy of a program with a graph of its own, which a pass may change. Names of nodes stay the same."""
    graph, copies = copied(program.graph.nodes)
    names = {node.name: copy.name for node, copy in copies.items()}
    if any(old != new for old, new in names.items()):
        _restore_names(copies)
    return dataclasses.replace(program, graph_module=lazy_module(program.graph_module, graph))


def with_targets(graph_module: fx.GraphModule, targets: Mapping[Any, Any]) -> fx.GraphModule:
    """Return a copy of a graph that calls `targets[op]` in place of each operator `op` in `targets`.

    A graph without these operators is returned itself.
    """
    if not any(node.op == "call_function" and node.target in targets for node in graph_module.graph.nodes):
        return graph_module
    graph, copies = copied(graph_module.graph.nodes)
    for node, copy in copies.items():
        if node.op == "call_function":
            copy.target = targets.get(node.target, node.target)
    return lazy_module(graph_module, graph)


def with_groups(graph_module: fx.GraphModule, name: Callable[[fx.Node], str]) -> fx.GraphModule:
    """Return a copy of a graph in which each collective runs in process group `name(node)`.

    If no group changes, the graph itself is returned.
    """
    names = {node: name(node) for node in graph_module.graph.nodes if is_collective(node)}
    if all(node.args[-1] == given for node, given in names.items()):
        return graph_module
    graph, copies = copied(graph_module.graph.nodes)
    for node, given in names.items():
        copies[node].args = (*copies[node].args[:-1], given)
    return lazy_module(graph_module, graph)


def in_order(graph_module: fx.GraphModule, order: Iterable[fx.Node]) -> fx.GraphModule:
    """Return a copy of a graph with its nodes in the given order, in which operands precede their readers.

    If the graph has this order already, the graph itself is returned.
    """
    nodes = list(order)
    if nodes == list(graph_module.graph.nodes):
        return graph_module
    return lazy_module(graph_module, copied(nodes)[0])


def _restore_names(copies: Mapping[fx.Node, fx.Node]) -> None:
    for node, copy in copies.items():
        copy._rename(f"renamed_{node.name}")
    for node, copy in copies.items():
        copy._rename(node.name)


def insert_call(
    graph: fx.Graph,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    like: fx.Node,
    name: str | None = None,
    kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> fx.Node:
    """Add a call at the graph's insertion point, and return its node, with a fake value computed from its operands.

    The call gets the phase, module and source line of the node `like`.
    """
    node = graph.create_node("call_function", target, args, dict(kwargs), name=name)
    node.meta = {key: like.meta[key] for key in _INHERITED if key in like.meta}
    node.meta["val"] = target(*fx.map_arg(args, lambda argument: argument.meta["val"]), **kwargs)
    return node


def replace_slot_node(program: Program, old: str, new: str) -> Program:
    """Return the program with node `new` in place of node `old` in its output slots. The graph is not changed."""
    outputs = tuple(dataclasses.replace(slot, node=new) if slot.node == old else slot for slot in program.outputs)
    return dataclasses.replace(program, outputs=outputs)
