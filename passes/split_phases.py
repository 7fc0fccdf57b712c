"""Cut a lowered joint program into what the forward call runs and what the backward call runs.

The forward holds every node that its outputs and buffer updates need, and everything of phase "forward" that the
backward reads; what the backward reads of it is saved. Backward nodes keep their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autoshard.ir.lowered import LoweredProgram, PhasedProgram
from autoshard.ir.program import InputKind, OutputKind

_FORWARD_RESULTS = (OutputKind.OUTPUT, OutputKind.BUFFER_UPDATE)


@dataclass(frozen=True, slots=True)
class SplitPhases:
    """See the module's docstring."""

    def __call__(self, lowered: LoweredProgram) -> PhasedProgram:
        """The two programs, sharing constants with `lowered`."""
        nodes = list(lowered.graph_module.graph.nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        results = nodes[-1].args[0]
        is_tangent = [slot.slot.kind == InputKind.TANGENT for slot in lowered.inputs]
        is_forward_result = [slot.slot.kind in _FORWARD_RESULTS for slot in lowered.outputs]
        forward = _forward_nodes(nodes, [r for r, flag in zip(results, is_forward_result, strict=True) if flag])
        saved = _saved(nodes, forward, [r for r, flag in zip(results, is_forward_result, strict=True) if not flag])
        forward_in, backward_in = _indices(is_tangent, False), _indices(is_tangent, True)
        forward_out, backward_out = _indices(is_forward_result, True), _indices(is_forward_result, False)
        return PhasedProgram(
            lowered=lowered,
            forward=_extract(
                lowered,
                [placeholders[i] for i in forward_in],
                forward,
                [*(results[i] for i in forward_out), *saved],
            ),
            backward=_extract(
                lowered,
                [*saved, *(placeholders[i] for i in backward_in)],
                {node for node in nodes if node not in forward},
                [results[i] for i in backward_out],
            ),
            forward_inputs=forward_in,
            forward_outputs=forward_out,
            backward_inputs=backward_in,
            backward_outputs=backward_out,
            saved=tuple(node.name for node in saved),
        )


def _indices(flags: Sequence[bool], wanted: bool) -> tuple[int, ...]:
    return tuple(index for index, flag in enumerate(flags) if flag == wanted)


def _forward_nodes(nodes: Sequence[fx.Node], results: Sequence[fx.Node]) -> set[fx.Node]:
    """Nodes of the forward phase, and whatever a forward result needs."""
    forward = {node for node in nodes if node.meta.get("phase") == "forward"}
    stack = list(results)
    while stack:
        node = stack.pop()
        if node not in forward:
            forward.add(node)
        stack += [operand for operand in node.all_input_nodes if operand not in forward]
    return forward


def _saved(nodes: Sequence[fx.Node], forward: set[fx.Node], results: Sequence[fx.Node]) -> list[fx.Node]:
    """Forward values that the backward reads, in program order: tensors only, rank integers are made again."""
    read = set(results) | {
        operand for node in nodes if node not in forward and node.op != "output" for operand in node.all_input_nodes
    }
    return [node for node in nodes if node in forward and node in read and _is_tensor(node)]


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor) and node.op != "get_attr"


def _extract(
    lowered: LoweredProgram, inputs: Sequence[fx.Node], members: set[fx.Node], results: Sequence[fx.Node]
) -> fx.GraphModule:
    """A graph of `members`: from `inputs` to `results`; scalars and constants of the other phase are copied in."""
    graph = fx.Graph()
    environment: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        environment[node] = graph.placeholder(node.name)
        environment[node].meta = dict(node.meta)
    for node in lowered.graph_module.graph.nodes:
        if node in members and node.op not in ("placeholder", "output"):
            _copy(node, graph, environment)
    graph.output(tuple(environment[node] for node in results))
    graph.eliminate_dead_code()
    return fx.GraphModule(lowered.graph_module, graph)


def _copy(node: fx.Node, graph: fx.Graph, environment: dict[fx.Node, fx.Node]) -> fx.Node:
    if node not in environment:
        for operand in node.all_input_nodes:
            _copy(operand, graph, environment)
        environment[node] = graph.node_copy(node, environment.__getitem__)
        environment[node].meta = dict(node.meta)
    return environment[node]
