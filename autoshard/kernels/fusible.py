"""Replaces semantic operators by functions of ATen operators, so that a compiler such as Inductor can fuse them.

| operator | function |
|---|---|
| attention | calls of torch's fused kernel for the device, and of the copies that it needs (`native_attention`) |
| cross-entropy | its definition. The backward has no scatter, so it is one pass over the logits |
| dropout, random numbers | Philox in integer operators, drawn where the numbers are used |
| squared norms | their definition |

Attention with dropout stays one call. Its function computes one block of queries after another, and the compiler would
generate code for each block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from autoshard.kernels import native_attention, native_cross_entropy
from autoshard.kernels.cross_entropy import (
    cross_entropy,
    cross_entropy_backward,
    cross_entropy_backward_reference,
    cross_entropy_reference,
)
from autoshard.kernels.dropout import dropout, dropout_reference
from autoshard.kernels.optimizers import sum_of_squares, sum_of_squares_reference
from autoshard.kernels.random_numbers import random, random_reference
from autoshard.kernels.split_cross_entropy import (
    split_cross_entropy,
    split_cross_entropy_backward,
    split_cross_entropy_backward_reference,
    split_cross_entropy_reference,
)

_DROPOUT_P = {native_attention.native: 5, native_attention.native_backward: 8}
"""From an attention operator to the position of the dropout probability among its arguments."""


_FUSIBLE: Mapping[OpOverload, Callable[..., Any]] = MappingProxyType(
    {
        native_attention.native: native_attention.native_attention,
        native_attention.native_backward: native_attention.native_attention_backward,
        cross_entropy: cross_entropy_reference,
        cross_entropy_backward: cross_entropy_backward_reference,
        native_cross_entropy.native: cross_entropy_reference,
        native_cross_entropy.native_backward: cross_entropy_backward_reference,
        split_cross_entropy: split_cross_entropy_reference,
        split_cross_entropy_backward: split_cross_entropy_backward_reference,
        native_cross_entropy.native_split: split_cross_entropy_reference,
        native_cross_entropy.native_split_backward: split_cross_entropy_backward_reference,
        dropout: dropout_reference,
        random: random_reference,
        sum_of_squares: sum_of_squares_reference,
    }
)


def traced_through(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a graph in which calls of semantic operators become calls of the functions in `_FUSIBLE`.

    These functions call ATen operators only. Attention with dropout is not replaced.

    Before → after: `autoshard.native_attention(...)` → a call of the Python function that implements the operator.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph_module.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if node.target in _FUSIBLE and _is_one_call(node):
            function: Any = torch.compiler.allow_in_graph(_FUSIBLE[node.target])
            copies[node].target = function
    return fx.GraphModule(graph_module, graph)


def _is_one_call(node: fx.Node) -> bool:
    place = _DROPOUT_P.get(node.target)  # type: ignore[arg-type]
    return place is None or bool(node.args[place] == 0.0)
