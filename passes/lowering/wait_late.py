"""Wait for a collective where its result is first read, so that what stands between computes meanwhile.

Before → after: `y = wait(all_reduce(x)); z = f(u); v = g(y)` → `c = all_reduce(x); z = f(u); y = wait(c); v = g(y)`.
Views of a result move with its wait, and so does what is made of it alone and only returned: gradients are waited for
at the end of the backward. Collectives start where they did, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from autoshard.ir.aliases import aliased_operands
from autoshard.ir.collectives import holds_operand, is_collective, is_wait
from autoshard.ir.lowered import PhasedProgram
from passes.lowering.rewrite_phases import rewrite_phases
from passes.preparation.rewriting import in_order


@dataclass(frozen=True, slots=True)
class WaitLate:
    """See the module's docstring.

    Args:
        most_held: collectives under way that hold what they send until they are waited for (gradients before a
            reduce-scatter): the oldest is waited for before one more starts. None: as many as there are.
    """

    most_held: int | None = None

    def __call__(self, phased: PhasedProgram) -> PhasedProgram:
        """The phases with their waits moved; the lowered program as a whole stays as it is, for verification."""
        return rewrite_phases(phased, self._rewrite)

    def _rewrite(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        if not any(is_wait(node) for node in graph_module.graph.nodes):
            return graph_module
        return in_order(graph_module, _order(graph_module.graph, self.most_held))


def _order(graph: fx.Graph, most_held: int | None) -> Iterator[fx.Node]:
    """The nodes, each late one just before the first node that reads it and is not late."""
    waiting = _late(graph)
    held: list[fx.Node] = []
    for node in graph.nodes:
        if node.op == "output":
            yield from list(waiting)
            yield node
        elif node not in waiting:
            yield from _taken(node, waiting)
            if most_held is not None and holds_operand(node):
                held = [*(item for item in held if not waiting.keys().isdisjoint(item.users)), node]
                yield from _taken_first(held[:-most_held], waiting)
            yield node


def _taken_first(collectives: Sequence[fx.Node], waiting: dict[fx.Node, None]) -> Iterator[fx.Node]:
    """Take the waits for these collectives out of what is waiting to be placed."""
    for wait in [user for item in collectives for user in item.users if user in waiting]:
        del waiting[wait]
        yield wait


def _taken(reader: fx.Node, waiting: dict[fx.Node, None]) -> Iterator[fx.Node]:
    """Take what `reader` needs out of what is waiting to be placed, operands first."""
    for operand in reader.all_input_nodes:
        if operand in waiting:
            del waiting[operand]
            yield from _taken(operand, waiting)
            yield operand


def _late(graph: fx.Graph) -> dict[fx.Node, None]:
    """Waits, and what moves with them, in the order of the graph."""
    only_returned = _only_returned(graph)
    late: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if is_wait(node):
            late[node] = None
        elif node.op == "call_function" and any(operand in late for operand in node.all_input_nodes):
            is_alone = all(operand in late for operand in node.all_input_nodes)
            if is_alone and not is_collective(node) and (aliased_operands(node) or node in only_returned):
                late[node] = None
    return late


def _only_returned(graph: fx.Graph) -> set[fx.Node]:
    """Calls whose results nothing but the output reads, by way of such calls, and no collective."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        is_returned = all(user.op == "output" or user in found for user in node.users)
        if is_returned and node.op == "call_function" and not is_collective(node):
            found.add(node)
    return found
