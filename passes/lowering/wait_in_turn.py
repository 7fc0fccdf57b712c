"""Orders buckets that are waited for at the end of a phase. The follow-up of one bucket starts once the next bucket has
started.

Before → after, for gradients in buckets a and b that are reduced over one axis and then over another, and the products
f and g that make them: `a = f(); start a; b = g(); start b; wait a; start a's second; wait b; start b's second` → `a =
f(); start a; b = g(); start b; wait a; start a's second; ...`, before the products of the next bucket. So second
reductions overlap with computation too, and the links of the first are never idle.

With `most_held`, at most this many reduce-scatters hold their operands. The oldest is waited for before a further one
starts.
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
    """Orders the waits for buckets.

    Args:
        most_held: reduce-scatters under way that hold their operands. None: no limit.
    """

    most_held: int | None = None

    def __call__(self, phased: PhasedProgram) -> PhasedProgram:
        """The phases in another order."""
        return rewrite_phases(phased, self._rewrite)

    def _rewrite(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        chained = _chained(graph_module.graph)
        if not chained and self.most_held is None:
            return graph_module
        return in_order(graph_module, _Turns(graph_module.graph, self.most_held, chained).order())


def _chained(graph: fx.Graph) -> list[fx.Node]:
    """Collectives of other collectives' results, without computation in between, on the way to the output."""
    found, returned = set[fx.Node](), only_returned(graph)
    for node in graph.nodes:
        behind = any(operand in found for operand in node.all_input_nodes)
        if is_wait(node) or (behind and (only_moves(node) or is_collective(node))):
            found.add(node)
    return [node for node in graph.nodes if node in found and node in returned and is_collective(node)]


@dataclass(slots=True)
class _Turns:
    """A graph that gets another order.

    Args:
        graph: the graph.
        most_held: limit of reduce-scatters, as in `WaitInTurn`.
        chained: collectives of other collectives' results, not started yet.
        placed: nodes that have their place.
        scattered: reduce-scatters in the order of their starts.
    """

    graph: fx.Graph
    most_held: int | None
    chained: Sequence[fx.Node]
    placed: set[fx.Node] = field(default_factory=set)
    scattered: list[fx.Node] = field(default_factory=list)

    def order(self) -> Iterator[fx.Node]:
        """The nodes, with due waits and follow-ups before and after each start."""
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
        """Wait for all but the last `most_held - 1` reduce-scatters."""
        if self.most_held is None:
            return
        for start in self.scattered[: len(self.scattered) - self.most_held + 1]:
            yield from (self._put(user) for user in start.users if user not in self.placed)

    def _start_chained(self, group: str, last: fx.Node) -> Iterator[fx.Node]:
        """Start all collectives that only need results sent over a group before its `last` collective."""
        for start in self.chained:
            needed = [] if start in self.placed else self._needed(start)
            sent = {node.all_input_nodes[0] for node in needed if is_wait(node)}
            if any(str(item.args[-1]) == group for item in sent) and last not in sent:
                yield from (self._put(node) for node in [*needed, start])
                yield from self._start_chained(str(start.args[-1]), start)

    def _needed(self, start: fx.Node) -> list[fx.Node]:
        """The unplaced moves that a start needs, operands first; empty if it needs more than moves."""
        found: dict[fx.Node, None] = {}

        def reach(node: fx.Node) -> bool:
            for operand in node.all_input_nodes:
                if operand not in self.placed and operand not in found:
                    if not (only_moves(operand) and reach(operand)):
                        return False
                    found[operand] = None
            return True

        return list(found) if reach(start) else []
