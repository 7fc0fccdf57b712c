"""Waits for a collective at the first reader of its result, so that earlier calls overlap with it.

Before → after: `y = wait(all_reduce(x)); z = f(u); v = g(y)` → `c = all_reduce(x); z = f(u); y = wait(c); v = g(y)`.
Views of a result move with its wait. So do values that depend on it alone and are only returned, so gradients are
waited for at the end of the backward. Collectives start at their old places, in the same order. An exception are
gradients that are reduced over one axis and then over another. Their second reductions move to the end too, after the
waits for all first reductions, so that both may join buckets. `WaitInTurn` starts them earlier afterwards.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from autoshard.graphs.aliases import aliased_operands
from autoshard.ir.collectives import is_collective, is_wait
from autoshard.ir.lowered import PhasedProgram
from passes.lowering.rewrite_phases import only_returned, rewrite_phases
from passes.preparation.rewriting import in_order


@dataclass(frozen=True, slots=True)
class WaitLate:
    """Moves waits to the first readers of their results."""

    def __call__(self, phased: PhasedProgram) -> PhasedProgram:
        """Move the waits of all phases. The uncut lowered program is unchanged, for verification."""
        return rewrite_phases(phased, _rewritten)


def _rewritten(graph_module: fx.GraphModule) -> fx.GraphModule:
    graph = graph_module.graph
    if not any(is_wait(node) for node in graph.nodes):
        return graph_module
    nodes, returned = list(graph.nodes), only_returned(graph)
    places = _places_in_chains(_late(nodes, returned, ()))
    for place in range(max(places.values(), default=0) + 1):
        staying = [node for node, found in places.items() if found <= place]
        nodes = list(_ordered(nodes, _late(nodes, returned, staying)))
    return in_order(graph_module, nodes)


def _ordered(nodes: Sequence[fx.Node], waiting: dict[fx.Node, None]) -> Iterator[fx.Node]:
    """The nodes, with each `waiting` node just before the first other node that reads it."""
    for node in nodes:
        if node.op == "output":
            yield from list(waiting)
            yield node
        elif node not in waiting:
            yield from _taken(node, waiting)
            yield node


def _taken(reader: fx.Node, waiting: dict[fx.Node, None]) -> Iterator[fx.Node]:
    """Take the operands of `reader` out of the waiting nodes, operands first."""
    for operand in reader.all_input_nodes:
        if operand in waiting:
            del waiting[operand]
            yield from _taken(operand, waiting)
            yield operand


def _late(nodes: Sequence[fx.Node], returned: Collection[fx.Node], staying: Collection[fx.Node]) -> dict[fx.Node, None]:
    """Waits and the nodes that move with them, in order; collectives only if `returned` and not `staying`."""
    late: dict[fx.Node, None] = {}
    for node in nodes:
        if is_wait(node):
            late[node] = None
        elif node.op == "call_function" and any(operand in late for operand in node.all_input_nodes):
            is_alone = all(operand in late for operand in node.all_input_nodes)
            may_move = node in returned or (bool(aliased_operands(node)) and not is_collective(node))
            if is_alone and may_move and node not in staying:
                late[node] = None
    return late


def _places_in_chains(late: Collection[fx.Node]) -> Mapping[fx.Node, int]:
    """The position of each late collective in its chain, counted from the chain's first, which does not move."""
    places: dict[fx.Node, int] = {}
    for node in late:
        places[node] = is_collective(node) + max(
            (places.get(operand, 0) for operand in node.all_input_nodes), default=0
        )
    return {node: place for node, place in places.items() if is_collective(node)}
