"""Emit the calls that each rank runs for one traced call into a graph of their own, to price them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autoshard.ir.mesh import Mesh
from autoshard.rules.emit_local import emit_local
from autoshard.rules.enumeration import Strategy
from passes.strategies.enumerate_strategies import Site
from passes.strategies.local_tracer import LocalTracer


def emitted_call(site: Site, strategy: Strategy, mesh: Mesh) -> fx.Graph:
    """Return a graph of the calls that each rank runs for a site's call under `strategy`.

    The graph has one placeholder for each use of an operand.
    """
    assert site.node is not None
    graph = fx.Graph()
    tracer = LocalTracer(graph)
    specs = iter(strategy.inputs)

    def operand(argument: fx.Node) -> Any:
        value = argument.meta["val"]
        if not isinstance(value, torch.Tensor):
            return value
        return tracer.placeholder(argument.name, value, next(specs).local_shape(value.shape, mesh))

    args, kwargs = fx.map_arg((site.node.args, site.node.kwargs), operand)
    result = emit_local(site.node.target, args, kwargs, site.rule, strategy, mesh, tracer=tracer)
    results = result if isinstance(result, tuple) else (result,)
    graph.output(tuple(item.node for item in results if isinstance(item, fx.Proxy)))
    return graph
