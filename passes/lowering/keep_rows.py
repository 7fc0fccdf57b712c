"""Saves the tokens that experts received from other ranks for the backward, as far as memory allows.

An expert layer with expert parallelism sends each token (a row of `x`) to the rank of its expert. Without this pass,
the backward sends the tokens again. Before:

    forward:   out = exchanged_experts(x, index, ...)
    backward:  exchanged_experts_backward(grad, x, index, ...)

After, the forward saves the received rows, the results `u` of the experts' first matrix products, and the counts:

    forward:   out, rows, u, counts = exchanged_experts_keeping(x, index, ...)
    backward:  exchanged_experts_kept_backward(grad, index, ..., rows, u, counts)

The backward then sends no tokens again, and computes four matrix products instead of five. If nothing else in the
backward reads `x`, the forward does not save `x`.

1. Each backward call is paired with the forward call that has equal operands. A layer whose tokens or router are
   recomputed saves no rows.
2. The last layers of the model save rows first, as many layers as memory allows. The number of rows depends on the
   router. Memory is counted for the busiest rank if all experts are equally likely.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from torch import fx

import autoshard.kernels as kernels
from autoshard.graphs.copy_nodes import copy_node
from autoshard.graphs.extract_graph import placeholder_like
from autoshard.graphs.lazy_module import lazy_module
from autoshard.ir.lowered import PhasedProgram
from autoshard.ir.recompute import PHASE
from cost_models.experts import busiest_rows
from passes.memory.lowered_memory import peak_bytes
from passes.memory.stage_load import ONE_STAGE, StageLoad
from passes.preparation.number_values import Numbering
from passes.preparation.rewriting import insert_call


@dataclass(frozen=True, slots=True)
class KeepRows:
    """Saves for the backward the rows (tokens) that expert layers receive from other ranks.

    Args:
        micro_batches: number of micro-batches in a step.
        memory_bytes: limit of each rank's peak memory. None: saved rows may not raise the peak.
        load: stages and micro-batches that the rank holds in memory at once.
    """

    micro_batches: int = 1
    memory_bytes: float | None = None
    load: StageLoad = ONE_STAGE

    def __call__(self, phased: PhasedProgram) -> PhasedProgram:
        """Return the program in which as many layers save their received rows as memory allows.

        The number of layers is found by bisection.
        """
        layers = list(_layers(phased).items())
        limit = self._peak(phased) if layers and self.memory_bytes is None else self.memory_bytes
        fitting, count, least, most = phased, len(layers), 0, len(layers)
        while limit is not None and least < most:
            made = _RowKeeper(phased, dict(layers[:count])).made()
            if self._peak(made) <= limit:
                fitting, least = made, count
            else:
                most = count - 1
            count = (least + most + 1) // 2
        return fitting

    def _peak(self, phased: PhasedProgram) -> int:
        return peak_bytes(phased, self.micro_batches, self.load)


def _layers(phased: PhasedProgram) -> dict[fx.Node, fx.Node]:
    """Return for the backward call of each expert layer its forward call, the last layer first.

    Only calls with equal operands belong together. A layer without such a forward call is left out.
    """
    calls = phased.forward.graph.find_nodes(op="call_function", target=kernels.exchanged_experts)
    if not calls:
        return {}
    numbering = Numbering()
    numbering.add_graph(phased.forward)
    numbering.restart_draws()
    made_from = {numbering.structure(call)[2][1:]: call for call in calls}
    kept = dict(zip(phased.backward.graph.find_nodes(op="placeholder"), _saved(phased), strict=False))
    layers, recomputed = dict[fx.Node, fx.Node](), set[fx.Node]()
    for node in phased.backward.graph.nodes:
        if node in kept:
            numbering.numbers[node] = numbering.numbers[kept[node]]
        elif node.op == "placeholder":
            numbering.add(node, ("tangent", node.name))
        elif node.op != "output":
            numbering.add_node(node, phased.backward)
        if node.meta.get("phase") == PHASE or not recomputed.isdisjoint(node.all_input_nodes):
            recomputed.add(node)
        if node.target is kernels.exchanged_experts_backward and recomputed.isdisjoint(node.args[1:4]):
            call = made_from.get(numbering.structure(node)[2][2:])
            layers |= {} if call is None else {node: call}
    return layers


def _saved(phased: PhasedProgram) -> list[fx.Node]:
    results: Any = phased.forward.graph.output_node().args[0]
    return list(results[len(phased.forward_outputs) :])


@dataclass(slots=True)
class _RowKeeper:
    """Rewrites a program so that some expert layers save their received rows.

    `layers` has these layers: the forward call by the backward call.
    """

    phased: PhasedProgram
    layers: Mapping[fx.Node, fx.Node]

    def made(self) -> PhasedProgram:
        forward, copies, kept = self._forward()
        needed = self._needed()
        taken = zip(self.phased.backward.graph.find_nodes(op="placeholder"), _saved(self.phased), strict=False)
        still = {node: source for node, source in taken if node in needed}
        results: Any = self.phased.forward.graph.output_node().args[0]
        given = [*results[: len(self.phased.forward_outputs)], *still.values()]
        new = [node for nodes in kept.values() for node in nodes]
        forward.output((*map(copies.__getitem__, given), *new))
        return replace(
            self.phased,
            forward=lazy_module(self.phased.forward, forward),
            backward=self._backward(list(still), kept, needed),
            saved=(*(node.name for node in still.values()), *(node.name for node in new)),
        )

    def _forward(self) -> tuple[fx.Graph, dict[fx.Node, fx.Node], dict[fx.Node, list[fx.Node]]]:
        """Return the graph of the new forward, without output node, and two dicts by nodes of the old forward.

        The first dict has the copy of each node. The second dict has, for each call that saves rows, the nodes of the
        saved rows, first products and counts.
        """
        old, graph, chosen = self.phased.forward.graph, fx.Graph(), set(self.layers.values())
        copies, kept = dict[fx.Node, fx.Node](), dict[fx.Node, list[fx.Node]]()
        for node in old.nodes:
            if node in chosen:
                copies[node], *kept[node] = _keeping_call(graph, node, fx.map_arg(node.args, copies.__getitem__))
            elif node.op != "output":
                copies[node] = copy_node(graph, node, copies.__getitem__)
        return graph, copies, kept

    def _needed(self) -> set[fx.Node]:
        """Return the nodes of the old backward that the new backward needs.

        Nodes that only compute the tokens of a layer in `layers` are not needed, because saved rows replace the tokens.
        """
        needed, waiting = set[fx.Node](), [self.phased.backward.graph.output_node()]
        while waiting:
            node = waiting.pop()
            if node not in needed:
                needed.add(node)
                waiting += _operands(node) if node in self.layers else node.all_input_nodes
        return needed

    def _backward(
        self, taken: Sequence[fx.Node], kept: Mapping[fx.Node, list[fx.Node]], needed: Collection[fx.Node]
    ) -> fx.GraphModule:
        """Return the new backward.

        Its inputs are the old saved values `taken` that it still reads, then the rows, products and counts of each
        layer, then the tangents. `kept` has the nodes of rows, products and counts, by forward call.
        """
        old, graph = self.phased.backward, fx.Graph()
        copies = {node: placeholder_like(graph, node) for node in taken}
        given = {call: [placeholder_like(graph, node) for node in nodes] for call, nodes in kept.items()}
        tangents = old.graph.find_nodes(op="placeholder")[len(self.phased.saved) :]
        copies |= {node: placeholder_like(graph, node) for node in tangents}
        for node in old.graph.nodes:
            if node in self.layers:
                copies[node] = _kept_call(graph, node, copies, given[self.layers[node]])
            elif node in needed and node.op != "placeholder":
                copies[node] = copy_node(graph, node, copies.__getitem__)
        return lazy_module(old, graph)


def _keeping_call(graph: fx.Graph, node: fx.Node, args: Any) -> list[fx.Node]:
    """Emit the forward call that saves rows, and return its output, received rows, first products and counts."""
    call = insert_call(graph, kernels.exchanged_experts_keeping, args, like=node, name=f"{node.name}_keeping")
    out, rows, u, counts = call.meta["val"]
    ranks, assignments = counts.shape[1], args[1].meta["val"].numel()
    most = ceil(busiest_rows(ranks * assignments, ranks))
    call.meta["val"] = (out, *(value.new_empty((most, value.shape[1])) for value in (rows, u)), counts)
    names = (node.name, *(f"{node.name}_kept_{word}" for word in ("rows", "u", "counts")))
    made = [
        insert_call(graph, operator.getitem, (call, index), like=node, name=name) for index, name in enumerate(names)
    ]
    made[0].meta = dict(node.meta)
    return made


def _operands(node: fx.Node) -> list[fx.Node]:
    """Return the nodes of a backward call's operands, without the tokens."""
    return [item for item in (node.args[0], *node.args[2:7]) if isinstance(item, fx.Node)]


def _kept_call(graph: fx.Graph, node: fx.Node, copies: Mapping[fx.Node, fx.Node], kept: list[fx.Node]) -> fx.Node:
    """Emit the backward call that takes the saved nodes `kept` in place of the tokens, and return it."""
    grad, _, *operands = node.args[:7]
    args = (*fx.map_arg((grad, *operands), copies.__getitem__), *kept, *node.args[7:])  # type: ignore[misc]
    made = graph.create_node("call_function", kernels.exchanged_experts_kept_backward, args, name=node.name)
    made.meta = dict(node.meta)
    return made
