"""Finds the gradients that a backward leaves None, because autograd's graph has no path from an output to an input.

An input with a path whose gradient is zero gets zeros instead of None. Autograd's graph of the traced call separates
the two cases. A Python function may return None for a gradient (`return grad, None`). Its traced backward shows this,
because no path leads from the tangent to the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, fx
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge

from autoshard.ir.program import InputKind, InputSlot, OutputKind

_Node = Any


def reached_inputs(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[frozenset[int], ...]:
    """Return for each output the indices of the inputs to which autograd's graph surely leads from it.

    A Python function with one result may return None for a gradient, so the inputs behind it do not count. The result
    is () if fewer than two outputs require grad.
    """
    if sum(output.requires_grad for output in outputs) < 2:
        return ()
    edges = {i: get_gradient_edge(tensor) for i, tensor in enumerate(inputs) if tensor.requires_grad}
    places: dict[_Node, set[int]] = {}
    for index, edge in edges.items():
        places.setdefault(edge.node, set()).add(index)
    roots = [get_gradient_edge(output).node if output.requires_grad else None for output in outputs]
    found = {node: frozenset(own) for node, own in places.items()}
    for root in roots:
        _find_reached(root, found)
    return tuple(frozenset() if root is None else found[root] for root in roots)


def _find_reached(root: _Node | None, found: dict[_Node, frozenset[int]]) -> None:
    """Add `root` and all nodes behind it to `found`, with the indices of the inputs to which each node leads."""
    waiting = [] if root is None else [root]
    while waiting:
        node = waiting[-1]
        behind = [] if _may_decline(node) else [item for item, _ in node.next_functions if item is not None]
        unknown = [] if node in found else [item for item in behind if item not in found]
        if unknown:
            waiting += unknown
            continue
        waiting.pop()
        if node not in found:
            found[node] = frozenset().union(*(found[item] for item in behind))


def _may_decline(node: _Node) -> bool:
    """Whether a node of autograd's graph is a Python function with one result, whose backward may return None.

    A function of several results gets zeros for results without a gradient, and passes zeros on.
    """
    results: Sequence[Any] = node._input_metadata
    return len(results) == 1 and isinstance(node, BackwardCFunction)


def own_gradients(outputs: Sequence[Tensor]) -> tuple[str, ...]:
    """Return the names of the user's `torch.autograd.Function` classes from which the outputs were computed."""
    functions = (getattr(node, "_forward_cls", None) for node in _nodes(outputs) if isinstance(node, BackwardCFunction))
    return tuple({f.__qualname__: None for f in functions if f is not None and not f.__module__.startswith(_LIBRARIES)})


def inputs_behind(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the inputs to which autograd's graph leads from any of the outputs, through Python functions too."""
    found = _nodes(outputs)
    return [x for x in inputs if x.requires_grad and get_gradient_edge(x).node in found]


def _nodes(outputs: Sequence[Tensor]) -> dict[_Node, None]:
    """Return all nodes of autograd's graph of the outputs, as keys of a dict in a reproducible order."""
    waiting = [get_gradient_edge(output).node for output in outputs if output.requires_grad]
    seen: dict[_Node, None] = dict.fromkeys(waiting)
    while waiting:
        node: _Node = waiting.pop()
        behind = {item: None for item, _ in node.next_functions if item is not None and item not in seen}
        seen.update(behind)
        waiting += behind
    return seen


_LIBRARIES = ("torch.", "autoshard.")


def unreached_gradients(
    graph: fx.Graph,
    inputs: Sequence[tuple[fx.Node, InputSlot]],
    gradients: Sequence[tuple[fx.Node, OutputKind, str]],
    reached: Mapping[str, frozenset[str]],
) -> dict[str, frozenset[str]]:
    """Return, for each tangent, the inputs whose gradient is None in a backward from the tangent's output alone.

    Tangents and inputs are given by name. The dict is empty if fewer than two tangents exist, or if every input gets a
    gradient from every tangent.

    Args:
        graph: the joint graph.
        inputs: its placeholders, each with its slot.
        gradients: node, kind and name of each result of the graph.
        reached: tangent → names of the inputs to which autograd's graph surely leads (`reached_inputs`).
    """
    if len(reached) < 2:
        return {}
    after: dict[fx.Node, frozenset[str]] = {}
    for node, slot in inputs:
        after[node] = frozenset((slot.name,)) if slot.kind is InputKind.TANGENT else frozenset()
    for node in graph.nodes:
        if node not in after:
            after[node] = frozenset().union(*(after[operand] for operand in node.all_input_nodes))
    wanted = [(name, after[node]) for node, kind, name in gradients if kind in _GRADIENTS]
    result = {
        tangent: frozenset(name for name, tangents in wanted if tangent not in tangents and name not in names)
        for tangent, names in reached.items()
    }
    return result if any(result.values()) else {}


_GRADIENTS = (OutputKind.GRADIENT, OutputKind.INPUT_GRADIENT)
