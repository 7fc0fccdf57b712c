"""Sends float32 gradients between ranks in 16 bits, at the user's request.

Before → after: `wait(all_reduce(x, "sum", "data/gradients"))` of float32 → `_to_copy(wait(all_reduce(_to_copy(x, bf16),
"sum", "data/narrow_gradients")), float32)`. Reduce-scatters are rewritten in the same way.

Each rank rounds its addend to 16 bits. The addends are added up in float32, and the sum is rounded once
(`autoshard.runtime.rank_order`). Megatron-LM's reduce-scatter with accumulation in float32 does the same. So the error
of a sum does not grow with the number of ranks. Losses and norms are never sent in 16 bits.
`passes.verification.widen_reductions` inverts the rewrite for verification.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autoshard.graphs.copy_nodes import copy_node
from autoshard.graphs.lazy_module import lazy_module
from autoshard.ir.communicators import Purpose, for_purpose
from autoshard.ir.lowered import PhasedProgram
from passes.preparation.canonicalize import is_view
from passes.strategies.local_tracer import LocalTracer

_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional
_REDUCTIONS = (_c10d.all_reduce.default, _c10d.reduce_scatter_tensor.default)
_SHAPING = (_aten.clone.default, _aten._to_copy.default, _aten.contiguous.default, _aten.constant_pad_nd.default)


@dataclass(frozen=True, slots=True)
class NarrowReductions:
    """Sends float32 gradients between ranks in `dtype`, which has 16 bits."""

    dtype: torch.dtype = torch.bfloat16

    def __call__(self, phased: PhasedProgram) -> PhasedProgram:
        """Return the program with phases that send gradients in `dtype`.

        The field `lowered` stays, for verification.
        """
        update = phased.update
        if update is not None:
            carried = update.graph.find_nodes(op="placeholder")[: len(phased.carried)]
            chosen = [node for node in _gradients(update.graph) if _source(node) in carried]
            update = self._narrowed(update, chosen)
        backward = self._narrowed(phased.backward, _gradients(phased.backward.graph))
        return replace(phased, backward=backward, update=update)

    def _narrowed(self, graph_module: fx.GraphModule, starts: Collection[fx.Node]) -> fx.GraphModule:
        if not starts:
            return graph_module
        graph = fx.Graph()
        tracer = LocalTracer(graph)
        waits = {user for node in starts for user in node.users}
        copies: dict[fx.Node, fx.Node] = {}

        def call(target: Any, args: tuple[Any, ...], like: fx.Node, **kwargs: Any) -> fx.Node:
            made = tracer.create_node("call_function", target, args, kwargs)
            made.meta |= {key: item for key, item in like.meta.items() if key != "val"}
            return made

        for node in graph_module.graph.nodes:
            if node in starts:
                value, *options, group = node.args
                narrow = call(_aten._to_copy.default, (copies[value],), node, dtype=self.dtype)
                name = for_purpose(str(group), Purpose.NARROW_GRADIENTS)
                copies[node] = call(node.target, (narrow, *options, name), node)
            elif node in waits:
                waited = call(node.target, (copies[node.args[0]],), node)
                copies[node] = call(_aten._to_copy.default, (waited,), node, dtype=node.meta["val"].dtype)
            else:
                copies[node] = copy_node(graph, node, copies.__getitem__)
        return lazy_module(graph_module, graph)


def _gradients(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes that start a sum of float32 gradients over ranks."""
    return [node for node in graph.nodes if node.target in _REDUCTIONS and _is_gradient(node)]


def _is_gradient(node: fx.Node) -> bool:
    is_sum = node.args[1] == "sum" and str(node.args[-1]).endswith(f"/{Purpose.GRADIENTS}")
    return is_sum and node.meta["val"].dtype is torch.float32


def _source(node: fx.Node) -> fx.Node:
    """Return the node that a reduction's operand is made from by views, copies, padding and conversions alone."""
    (source,) = node.all_input_nodes
    while len(source.all_input_nodes) == 1 and (is_view(source) or source.target in _SHAPING):
        (source,) = source.all_input_nodes
    return source
