"""Starts the second reduction of a bucket early, and limits the number of reduce-scatters under way.

Gradients may be reduced over one mesh axis and then over another. `WaitLate` has put all waits and all second
reductions at the end of the phase. This pass starts the second reduction of bucket a once the first reduction of the
next bucket b has started. Before → after, for the computations f, g and h of three buckets:

    a = f(); start a; b = g(); start b; c = h(); start c; wait a; start a's second; wait b; start b's second; ...
    a = f(); start a; b = g(); start b; wait a; start a's second; c = h(); start c; wait b; start b's second; ...

So second reductions overlap with computation too, and the links of the first reduction are never idle.

A reduce-scatter under way holds its operand in memory. With `most_held`, at most this many reduce-scatters are under
way. A further reduce-scatter starts only after the wait for the oldest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import fx

from autoshard.ir.collectives import REDUCE_SCATTER, is_collective, is_wait
from autoshard.ir.lowered import PhasedProgram
from passes.lowering.rewrite_phases import only_moves, only_returned, rewrite_phases
from passes.preparation.rewriting import in_order


@dataclass(frozen=True, slots=True)
class WaitInTurn:
    """Starts the second reduction of gradients earlier, if they are reduced over one mesh axis and then over another.

    With `most_held`, at most this many reduce-scatters are under way at once.
    """

    most_held: int | None = None

    def __call__(self, phased: PhasedProgram) -> PhasedProgram:
        return rewrite_phases(phased, self._rewrite)

    def _rewrite(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        chained = _chained(graph_module.graph)
        if not chained and self.most_held is None:
            return graph_module
        return in_order(graph_module, _Turns(graph_module.graph, self.most_held, chained).order())


def _chained(graph: fx.Graph) -> list[fx.Node]:
    """Return the collectives whose operand is the result of another collective, and whose own result is only returned.

    Waits, views and copies may lie between the two collectives.
    """
    found, returned = set[fx.Node](), only_returned(graph)
    for node in graph.nodes:
        behind = any(operand in found for operand in node.all_input_nodes)
        if is_wait(node) or (behind and (only_moves(node) or is_collective(node))):
            found.add(node)
    return [node for node in graph.nodes if node in found and node in returned and is_collective(node)]


@dataclass(slots=True)
class _Turns:
    """Yields all nodes of a graph in a new order, in which waits and the collectives `chained` come earlier.

    Args:
        chained: the second reductions, whose operands are results of other collectives (`_chained`).
        placed: the nodes that have been yielded.
        scattered: the reduce-scatters that have started, in order.
    """

    graph: fx.Graph
    most_held: int | None
    chained: Sequence[fx.Node]
    placed: set[fx.Node] = field(default_factory=set)
    scattered: list[fx.Node] = field(default_factory=list)

    def order(self) -> Iterator[fx.Node]:
        """Yield all nodes in the new order.

        Before each reduce-scatter come the waits that keep the limit `most_held`. After each collective come the
        `chained` collectives that can now start.
        """
        for node in self.graph.nodes:
            if node in self.placed:
                continue
            if node.target is REDUCE_SCATTER:
                yield from self._wait_for_the_oldest()
                self.scattered.append(node)
            yield self._put(node)
            if is_collective(node):
                yield from self._start_chained(str(node.args[-1]), node)

    def _put(self, node: fx.Node) -> fx.Node:
        self.placed.add(node)
        return node

    def _wait_for_the_oldest(self) -> Iterator[fx.Node]:
        """Yield the waits for all started reduce-scatters but the last `most_held - 1`, unless they are placed."""
        if self.most_held is None:
            return
        for start in self.scattered[: len(self.scattered) - self.most_held + 1]:
            yield from (self._put(user) for user in start.users if user not in self.placed)

    def _start_chained(self, group: str, last: fx.Node) -> Iterator[fx.Node]:
        """Yield the `chained` collectives that can start once collective `last` of process group `group` has started.

        Such a collective reads the result of an earlier collective of `group` than `last`. Only waits, views and copies
        lie between the two, and they are yielded first.
        """
        for start in self.chained:
            needed = [] if start in self.placed else self._needed(start)
            sent = {node.all_input_nodes[0] for node in needed if is_wait(node)}
            if any(str(item.args[-1]) == group for item in sent) and last not in sent:
                yield from (self._put(node) for node in [*needed, start])
                yield from self._start_chained(str(start.args[-1]), start)

    def _needed(self, start: fx.Node) -> list[fx.Node]:
        """Return the waits, views and copies that must be placed before the collective `start`, operands first.

        The result is empty if `start` also needs another call that is not placed.
        """
        found: dict[fx.Node, None] = {}

        def reach(node: fx.Node) -> bool:
            for operand in node.all_input_nodes:
                if operand not in self.placed and operand not in found:
                    if not (only_moves(operand) and reach(operand)):
                        return False
                    found[operand] = None
            return True

        return list(found) if reach(start) else []
