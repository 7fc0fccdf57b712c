"""Find the calls that work on tokens sorted by expert, and their strategies on an axis that splits tokens.

A mixture of experts sorts tokens by the experts that they go to, and computes in that order. Then it puts results back
into the order of the tokens. To a sharding rule a sort needs all tokens. But the result of one token depends on no
other token. So each rank can route its own tokens alone, as if they were a batch. Megatron-LM's dispatcher does this
(megatron/core/transformer/moe/token_dispatcher.py): tokens enter it as tensor and context ranks have them, and its
exchange spans these ranks too.

1. The sort of a top-k's choices gives an *order*. The sort of an order gives the indices that put tokens back.
2. A value that is selected by an order is sorted by expert. So is each value computed from it, until it is put back. In
   the backward, the transposes of these two selections (`index_add`) do the same.
3. In such a call the axis splits the dim of each operand and result that grows with the number of sequences, and no
   other dim. A result that does not grow (the gradient of a weight) is partial.

A layer of experts may also be one operator (`autoshard.kernels.experts`), which routes its tokens itself. An axis that
splits tokens splits this operator like the calls above. The expert axis splits the matrices of its experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

import autoshard.kernels as kernels
from autoshard.ir.program import tensor_values
from autoshard.ir.spec import PartitionSpec
from autoshard.kernels.experts import FIRST_MATRIX
from autoshard.rules.enumeration import Strategy
from passes.search.layers.fold_program import FoldedProgram
from passes.search.layers.propagate_axis import LAYERS
from passes.search.layers.trace_values import source_of
from passes.strategies.enumerate_strategies import operands_of

aten = torch.ops.aten
_SORTS = frozenset({aten.sort.default, aten.sort.stable})
_SELECTIONS = frozenset({aten.index_select.default, aten.index_add.default})


def routed_calls(folded: FoldedProgram, axis: str) -> dict[str, Strategy]:
    """Return the calls on tokens sorted by expert, by name, with their strategy on an axis that splits tokens.

    The two traces of `folded` tell which dims grow with the number of sequences.
    """
    found: dict[str, Strategy] = {}
    for node in (*_in_experts_order(folded), *layers_of_experts(folded)):
        strategy = _strategy(node, folded.twin, axis)
        if any(spec.dims for spec in strategy.inputs):
            found[node.name] = strategy
    return found


def layers_of_experts(folded: FoldedProgram) -> list[fx.Node]:
    """Return the calls of operators that compute all experts of a layer at once (`LAYERS`)."""
    return [node for node in folded.single.graph.nodes if node.op == "call_function" and node.target in LAYERS]


def matrices_of_layers(folded: FoldedProgram) -> list[fx.Node]:
    """Return the operands of forward calls of `kernels.experts` that have a matrix for each expert along dim 0."""
    layers = (node for node in layers_of_experts(folded) if node.target is kernels.experts)
    return [operand for node in layers for operand in operands_of(node)[FIRST_MATRIX:]]


def shared_layers(folded: FoldedProgram, axis: str) -> dict[str, Strategy]:
    """Return the strategy of each layer of experts that is one operator, on the expert axis, by the call's name.

    On this axis each rank has its own tokens.
    """
    return {node.name: _shared(node, axis) for node in layers_of_experts(folded)}


def _shared(node: fx.Node, axis: str) -> Strategy:
    """Return the strategy that splits experts' matrices along dim 0, and in the backward also their gradients."""
    split, whole = PartitionSpec(axis), PartitionSpec()
    is_backward = node.target is kernels.experts_backward
    first = FIRST_MATRIX + is_backward
    matrices, results = len(operands_of(node)) - first, sum(value is not None for value in tensor_values(node))
    gradients = matrices if is_backward else 0
    inputs = (*(whole,) * first, *(split,) * matrices)
    return Strategy(inputs, (*(whole,) * (results - gradients), *(split,) * gradients), (None,))


def _in_experts_order(folded: FoldedProgram) -> list[fx.Node]:
    """Return the calls that compute an order of tokens by expert, or that read or make tokens in this order."""
    forth: set[fx.Node] = set()
    back: set[fx.Node] = set()
    found = []
    for node in folded.single.graph.nodes:
        if node.op != "call_function":
            continue
        sorted_by = source_of(node.args[0])[0] if node.target in _SORTS else None
        index = node.args[2] if node.target in _SELECTIONS else None
        if sorted_by is not None and sorted_by in forth:
            back.add(node)
        elif sorted_by is not None and sorted_by.target is aten.topk.default:
            forth.add(node)
        elif index is not None and (index in back or index in forth):
            if (index in forth) == (node.target is aten.index_select.default):
                forth.add(node)
        elif any(item in back for item in node.all_input_nodes):
            back.add(node)
        elif any(item in forth for item in node.all_input_nodes):
            forth.add(node)
        else:
            continue
        found.append(node)
    return found


def _strategy(node: fx.Node, twins: Mapping[str, fx.Node], axis: str) -> Strategy:
    operands = operands_of(node)
    inputs = tuple(_along_tokens(item, twins, axis)[0] for item in operands)
    outputs = _along_tokens(node, twins, axis)
    if any(spec.dims for spec in inputs):
        outputs = tuple(spec if spec.dims else PartitionSpec(partial={axis: "sum"}) for spec in outputs)
    return Strategy(inputs, outputs, (None,))


def _along_tokens(node: fx.Node, twins: Mapping[str, fx.Node], axis: str) -> tuple[PartitionSpec, ...]:
    """Return the spec of each result of a node, in which `axis` splits the dim that grows with the number of sequences.

    `twins` has each node of the program of two sequences, by the name of the same node for one sequence.
    """
    values = zip(tensor_values(node), tensor_values(twins[node.name]), strict=True)
    return tuple(_growing(one.shape, two.shape, axis) for one, two in values if one is not None and two is not None)


def _growing(one: Sequence[int], two: Sequence[int], axis: str) -> PartitionSpec:
    """Return the spec in which `axis` splits the first dim that differs between the shapes `one` and `two`.

    `one` is the shape of a value for one sequence, and `two` its shape for two sequences.
    """
    grows = [before != after for before, after in zip(one, two, strict=True)]
    return PartitionSpec(*(None,) * grows.index(True), axis) if any(grows) else PartitionSpec()
