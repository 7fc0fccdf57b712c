"""Moves the wait for a collective to the first reader of its result, so that the calls in between overlap with it.

Before → after: `y = wait(all_reduce(x)); z = f(u); v = g(y)` → `c = all_reduce(x); z = f(u); y = wait(c); v = g(y)`.
Views of the result move with the wait. Calls of one operand, and pointwise calls, move too if all their operands have
moved and their values are only returned. So gradients are waited for at the end of the backward. Products stay: a
gradient of a weight is computed at once, and its gathered operands are freed.

Collectives start at their old places, in the same order, with one exception. Gradients may be reduced over one mesh
axis and then over another. Their second reductions move to the end too, behind the waits for all first reductions, so
that both reductions can be put into buckets. `WaitInTurn` later starts the second reductions earlier.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from autoshard.graphs.aliases import aliased_operands
from autoshard.graphs.pointwise import is_pointwise
from autoshard.ir.collectives import is_collective, is_wait
from autoshard.ir.lowered import PhasedProgram
from passes.lowering.rewrite_phases import only_returned, rewrite_phases
from passes.preparation.rewriting import in_order


@dataclass(frozen=True, slots=True)
class WaitLate:
    """Moves each wait for a collective to just before the first reader of its result."""

    def __call__(self, phased: PhasedProgram) -> PhasedProgram:
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
    """Yield `nodes` in the new order: each node of `waiting` comes just before its first reader outside of `waiting`.

    `waiting` is emptied.
    """
    for node in nodes:
        if node.op == "output":
            yield from list(waiting)
            yield node
        elif node not in waiting:
            yield from _taken(node, waiting)
            yield node


def _taken(reader: fx.Node, waiting: dict[fx.Node, None]) -> Iterator[fx.Node]:
    """Yield the nodes of `waiting` from which `reader` is computed, operands first, and remove them from `waiting`."""
    for operand in reader.all_input_nodes:
        if operand in waiting:
            del waiting[operand]
            yield from _taken(operand, waiting)
            yield operand


def _late(nodes: Sequence[fx.Node], returned: Collection[fx.Node], staying: Collection[fx.Node]) -> dict[fx.Node, None]:
    """Return, as an ordered set, the waits and all nodes that move behind them.

    A view of a moved result moves too, and so does a call in `returned` that ends a reduction. Collectives in `staying`
    do not move.
    """
    late: dict[fx.Node, None] = {}
    for node in nodes:
        if is_wait(node):
            late[node] = None
        elif node.op == "call_function" and any(operand in late for operand in node.all_input_nodes):
            is_alone = all(operand in late for operand in node.all_input_nodes)
            may_move = _ends_a_reduction(node, returned) or (bool(aliased_operands(node)) and not is_collective(node))
            if is_alone and may_move and node not in staying:
                late[node] = None
    return late


def _ends_a_reduction(node: fx.Node, returned: Collection[fx.Node]) -> bool:
    """Whether a call makes a result of the graph from a reduced value, for example by a cast or a sum.

    `returned` has the calls whose results are only returned.
    """
    return node in returned and (len(node.all_input_nodes) == 1 or is_pointwise(node.target))


def _places_in_chains(late: Collection[fx.Node]) -> Mapping[fx.Node, int]:
    """Return the position of each collective of `late` in its chain of collectives.

    In a chain, each collective reads the result of the collective before. The first collective of a chain does not
    move, and is not in `late`. Its position is 0.
    """
    places: dict[fx.Node, int] = {}
    for node in late:
        places[node] = is_collective(node) + max(
            (places.get(operand, 0) for operand in node.all_input_nodes), default=0
        )
    return {node: place for node, place in places.items() if is_collective(node)}
