"""Mutations of hoisting, which computes values once for all micro-batches, and of gathers of updated parameters."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from torch import fx

from autoshard.ir.collectives import ALL_GATHER
from autoshard.ir.lowered import PhasedProgram
from autoshard.ir.program import InputKind
from tests.passes.mutations import NothingError, choose, copy_of, is_tensor, pick

_OF_A_CALL = (InputKind.INPUT, InputKind.SEED)
_Found = tuple[str, PhasedProgram]


def hoist_what_differs(phased: PhasedProgram, random: Random) -> _Found:
    """Hoist a call that reads an input or a seed, although its result differs between micro-batches."""
    taken = zip(phased.forward_inputs, phased.forward.graph.find_nodes(op="placeholder"), strict=False)
    places = {node: index for index, node in taken}
    own = {node for node, index in places.items() if phased.lowered.inputs[index].slot.kind in _OF_A_CALL}

    def reads_own(node: fx.Node) -> bool:
        operands = set(node.all_input_nodes)
        return is_tensor(node) and places.keys() >= operands and not own.isdisjoint(operands)

    picked = pick(phased.forward.graph, random, reads_own)
    if phased.update is None:
        raise NothingError
    hoisted, indices = _with_call(phased, picked, places)
    forward = copy_of(phased.forward)
    same = next(node for node in forward.graph.nodes if node.name == picked.name)
    with forward.graph.inserting_after(forward.graph.find_nodes(op="placeholder")[-1]):
        same.replace_all_uses_with(forward.graph.placeholder("hoisted_" + picked.name))
    forward.graph.erase_node(same)
    wrong = replace(phased, hoisted=hoisted, hoisted_inputs=indices, forward=forward)
    return f"{picked} once for all micro-batches", wrong


def _with_call(
    phased: PhasedProgram, picked: fx.Node, places: dict[fx.Node, int]
) -> tuple[fx.GraphModule, tuple[int, ...]]:
    """Return the hoisted graph with a copy of the call `picked`, and the indices of the graph's inputs."""
    old = fx.GraphModule({}, fx.Graph()) if phased.hoisted is None else phased.hoisted
    graph, indices, made = fx.Graph(), list(phased.hoisted_inputs), dict[fx.Node, fx.Node]()
    for node in old.graph.find_nodes(op="placeholder"):
        made[node] = graph.node_copy(node)
    given = dict(zip(indices, made.values(), strict=True))
    for operand in picked.all_input_nodes:
        if places[operand] not in given:
            given[places[operand]] = graph.node_copy(operand)
            indices.append(places[operand])
        made[operand] = given[places[operand]]
    for node in (*old.graph.nodes, picked):
        if node.op not in ("placeholder", "output"):
            made[node] = graph.node_copy(node, made.__getitem__)
    graph.output((*(made[node] for node in results_of(phased.hoisted)), made[picked]))
    return fx.GraphModule(old, graph), tuple(indices)


def gather_before_the_update(phased: PhasedProgram, random: Random) -> _Found:
    """Let a gather send an input of the update, such as the old parameter, in place of the updated parameter."""
    if phased.update is None:
        raise NothingError
    update = copy_of(phased.update)
    given = update.graph.find_nodes(op="placeholder")

    def before(operand: fx.Node) -> list[fx.Node]:
        value: Any = operand.meta["val"]
        likes = [node.meta["val"] for node in given]
        return [node for node, like in zip(given, likes, strict=True) if _is_like(value, like) and node is not operand]

    gather = pick(
        update.graph, random, lambda node: node.target is ALL_GATHER and bool(before(node.all_input_nodes[0]))
    )
    (operand,) = gather.all_input_nodes
    old = choose(random, before(operand))
    gather.replace_input_with(operand, old)
    return f"{gather} sends {old}", replace(phased, update=update)


def _is_like(value: Any, other: Any) -> bool:
    return value.shape == other.shape and value.dtype == other.dtype


def results_of(graph_module: fx.GraphModule | None) -> list[Any]:
    """Return the nodes that a graph returns; an absent graph returns no nodes."""
    return [] if graph_module is None else list(graph_module.graph.output_node().args[0])  # type: ignore[arg-type]


HOIST_MUTATIONS = (hoist_what_differs, gather_before_the_update)
