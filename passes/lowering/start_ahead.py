"""Starts the gather of each layer's parameters before the previous layer, so that it overlaps with that layer.

Before: `y = f(x, wait(all_gather(p)))`, `z = g(y, wait(all_gather(q)))`. After: `p1 = all_gather(p)`,
`q1 = all_gather(q)`, `y = f(x, wait(p1))`, `z = g(y, wait(q1))`. Each gather starts right before the wait for the
previous gather of the same process group. The first gather starts at the beginning of its phase. The operand of a
gather is computed just before the gather starts, so memory holds one more gathered value than without this pass.

In the forward and the backward, the pass moves gathers of values that are computed from parameters alone. Nothing in
these phases writes parameters.

The pass runs twice. With `by=None` it moves all gathers to the beginning of their phase, in the order of their waits,
so that `BucketCollectives` can join them. In the update, this run also moves the collectives of the phase's inputs
(gradients of micro-batches). The second run, with a number, moves the buckets to their places.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from autoshard.graphs.extract_graph import needed
from autoshard.ir.collectives import ALL_GATHER, is_collective, is_wait
from autoshard.ir.communicators import Purpose, is_for
from autoshard.ir.lowered import PhasedProgram
from passes.preparation.rewriting import in_order


@dataclass(frozen=True, slots=True)
class StartAhead:
    """Moves gathers of parameters to earlier places, so that they overlap with the calls before their readers.

    `by` is the number of later gathers of the same process group that have started when the device waits for a gather.
    None: all gathers start at the beginning of the phase.
    """

    by: int | None = 1

    def __call__(self, phased: PhasedProgram) -> PhasedProgram:
        update = phased.update
        return replace(
            phased,
            forward=_moved(phased.forward, _gathers(phased.forward.graph), self.by),
            backward=_moved(phased.backward, _gathers(phased.backward.graph), self.by),
            update=update
            if update is None or self.by is not None
            else _moved(update, _sent_as_given(update.graph), None),
        )


def _gathers(graph: fx.Graph) -> list[fx.Node]:
    """Return the all-gathers whose communicator has the purpose "parameters" (`NameCommunicators`)."""
    nodes = graph.find_nodes(op="call_function", target=ALL_GATHER)
    return [node for node in nodes if is_for(str(node.args[-1]), Purpose.PARAMETERS)]


def _sent_as_given(graph: fx.Graph) -> list[fx.Node]:
    """Return the collectives whose operand is an input of the phase, directly or through calls with one operand."""
    found: set[fx.Node] = set(graph.find_nodes(op="placeholder"))
    for node in graph.nodes:
        if len(node.all_input_nodes) == 1 and node.all_input_nodes[0] in found and node.op == "call_function":
            found.add(node)
    return [node for node in graph.nodes if node in found and is_collective(node)]


def _moved(graph_module: fx.GraphModule, starts: Sequence[fx.Node], by: int | None) -> fx.GraphModule:
    if not starts:
        return graph_module
    order = _Order(graph_module.graph, starts)
    return in_order(graph_module, order.from_the_head() if by is None else order.ahead(by))


@dataclass(slots=True)
class _Order:
    """Yields all nodes of a graph in a new order, in which the collectives `starts` come earlier.

    All other nodes keep their order, except the nodes from which the collectives are computed.

    Args:
        starts: the collectives that come earlier, sorted by the first reader of their results.
        moving: `starts` and all calls from which they are computed. Each of these calls, except the starts, is yielded
            right before its first reader.
        depths: for each node, the greatest number of `starts` on a path that leads to it, itself included.
        placed: the nodes that have been yielded.
    """

    graph: fx.Graph
    starts: Sequence[fx.Node]
    moving: set[fx.Node] = field(init=False)
    depths: dict[fx.Node, int] = field(init=False)
    placed: set[fx.Node] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.moving = {node for node in needed(self.starts) if node.op == "call_function"}
        self.depths = _depths(self.graph, frozenset(self.starts))
        self.starts = sorted(self.starts, key=_first_reads(self.graph, self.moving).__getitem__)

    def from_the_head(self) -> Iterator[fx.Node]:
        """Yield all nodes, with all `starts` at the head of the graph.

        A start that reads the result of another start comes after it.
        """
        yield from self._placeholders()
        for start in sorted(self.starts, key=self.depths.__getitem__):
            yield from self._place(start, {})
        yield from self._rest({})

    def ahead(self, by: int) -> Iterator[fx.Node]:
        """Yield all nodes, with each start moved right before the wait for an earlier start.

        Starts with the same process group and depth are queued in order. The earlier start is `by` places before in the
        queue.
        """
        yield from self._placeholders()
        queues = defaultdict[object, list[fx.Node]](list)
        for start in self.starts:
            queues[start.args[-1], self.depths[start]].append(start)
        behind = {start: queue[place : place + by] for queue in queues.values() for place, start in enumerate(queue, 1)}
        for queue in queues.values() if by else ():
            if self.depths[queue[0]] == 1:
                yield from self._place(queue[0], behind)
        yield from self._rest(behind)

    def _placeholders(self) -> Iterator[fx.Node]:
        for node in self.graph.find_nodes(op="placeholder"):
            self.placed.add(node)
            yield node

    def _rest(self, behind: Mapping[fx.Node, Sequence[fx.Node]]) -> Iterator[fx.Node]:
        for node in self.graph.nodes:
            if node not in self.moving:
                yield from self._place(node, behind)

    def _place(self, node: fx.Node, behind: Mapping[fx.Node, Sequence[fx.Node]]) -> Iterator[fx.Node]:
        """Yield a node after its operands, unless the node is placed already.

        Before the wait for a collective, the starts in `behind` for this collective are yielded.
        """
        if node in self.placed:
            return
        for operand in node.all_input_nodes:
            yield from self._place(operand, behind)
        if is_wait(node):
            for start in behind.get(node.all_input_nodes[0], ()):
                yield from self._place(start, behind)
        self.placed.add(node)
        yield node


def _first_reads(graph: fx.Graph, moving: Collection[fx.Node]) -> dict[fx.Node, int]:
    """Return each node's index in the graph.

    For a node in `moving`, return the index of its first reader outside of `moving`.
    """
    first: dict[fx.Node, int] = {}
    for place, node in reversed(list(enumerate(graph.nodes))):
        first[node] = min((first[user] for user in node.users), default=place) if node in moving else place
    return first


def _depths(graph: fx.Graph, starts: frozenset[fx.Node]) -> dict[fx.Node, int]:
    """Return for each node the greatest number of `starts` on a path that leads to it, itself included."""
    depths: dict[fx.Node, int] = {}
    for node in graph.nodes:
        depths[node] = (node in starts) + max((depths[operand] for operand in node.all_input_nodes), default=0)
    return depths
