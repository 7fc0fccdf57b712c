"""Emit the local form of one call, or the steps of one reshard, into a graph of their own: to count what is in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autoshard.ir.emit import emit_reshard
from autoshard.ir.mesh import Mesh
from autoshard.ir.reshard import ReshardStep
from autoshard.rules.emit_local import emit_local
from autoshard.rules.enumeration import Strategy
from passes.strategies.enumerate_strategies import Site
from passes.strategies.local_tracer import LocalTracer


def emitted_call(
    site: Site, strategy: Strategy, mesh: Mesh, strides: Mapping[int, Sequence[int]] | None = None
) -> fx.Graph:
    """The local form of a call under a strategy: from its operands, repeated where it repeats them, to its results.

    `strides`: of operands whose dims lie in memory in the order that these have; the dims of others lie as they come.
    """
    assert site.node is not None
    graph = fx.Graph()
    tracer = LocalTracer(graph)
    specs, lying = iter(enumerate(strategy.inputs)), strides or {}

    def operand(argument: fx.Node) -> Any:
        value = argument.meta["val"]
        if not isinstance(value, torch.Tensor):
            return value
        index, spec = next(specs)
        return tracer.placeholder(argument.name, value, spec.local_shape(value.shape, mesh), lying.get(index))

    args, kwargs = fx.map_arg((site.node.args, site.node.kwargs), operand)
    shapes = [result.shape for result in site.results]
    result = emit_local(site.node.target, args, kwargs, site.rule, strategy, mesh, shapes, tracer=tracer)
    results = result if isinstance(result, tuple) else (result,)
    graph.output(tuple(item.node for item in results if isinstance(item, fx.Proxy)))
    return graph


def unread_operands(site: Site, strategy: Strategy, mesh: Mesh) -> frozenset[int]:
    """The operands that nothing in the results of a call's local rewrite is made of: a split layer norm's bias."""
    if site.rule is None or site.rule.local is None or not strategy.splits(mesh):
        return frozenset()
    graph = emitted_call(site, strategy, mesh)
    graph.eliminate_dead_code()
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    return frozenset(index for index, node in enumerate(placeholders) if not node.users)


def emitted_reshard(
    value: torch.Tensor, steps: Sequence[ReshardStep], mesh: Mesh, *, as_traced: bool = False
) -> fx.Graph:
    """Steps of a reshard of a global `value`: from the local value before to the one after.

    `as_traced`: the dims of what is resharded lie in memory as those of the traced value do.
    """
    graph = fx.Graph()
    tracer = LocalTracer(graph)
    shape = tuple(value.shape)
    strides = value.stride() if as_traced else None
    like = torch.empty(
        (), dtype=value.dtype, device="meta"
    )  # knows all that counts, and is made sooner than a fake one
    local = tracer.placeholder("value", like, steps[0].source.local_shape(shape, mesh), strides)
    graph.output((emit_reshard(local, steps, shape, mesh, dtype=value.dtype).node,))
    return graph
