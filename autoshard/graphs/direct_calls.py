"""Replaces calls of `torch.ops` by calls of torch's Python functions, which start the same kernels with less overhead.

Before → after: `torch.ops.aten.mm.default(x, y)` → `torch.mm(x, y)`; `torch.ops.aten.view.default(x, shape)` →
`x.view(shape)`. The pass serves graphs that run as they are, without a compiler such as Inductor. A call of `torch.ops`
matches its arguments to a schema; functions of torch parse arguments in generated code, which saves some microseconds a
call. The tables have the most frequent operators whose functions take the same arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

_aten = torch.ops.aten

METHODS: Mapping[Any, str] = MappingProxyType(
    {
        _aten.contiguous.default: "contiguous",
        _aten.copy_.default: "copy_",
        _aten.expand.default: "expand",
        _aten.new_empty.default: "new_empty",
        _aten.permute.default: "permute",
        _aten.reshape.default: "reshape",
        _aten.view.default: "view",
    }
)
"""From an operator to the name of a tensor method with the same result, called on the operator's first argument."""

FUNCTIONS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        _aten.add.Tensor: torch.add,
        _aten.add.out: torch.add,
        _aten.addmm.default: torch.addmm,
        _aten.amax.default: torch.amax,
        _aten.bmm.default: torch.bmm,
        _aten.cat.default: torch.cat,
        _aten.clone.default: torch.clone,
        _aten.cos.default: torch.cos,
        _aten.div.Scalar: torch.div,
        _aten.div.Tensor: torch.div,
        _aten.exp.default: torch.exp,
        _aten.mean.dim: torch.mean,
        _aten.mm.default: torch.mm,
        _aten.mm.out: torch.mm,
        _aten.mul.Scalar: torch.mul,
        _aten.mul.Tensor: torch.mul,
        _aten.native_layer_norm.default: torch.native_layer_norm,
        _aten.neg.default: torch.neg,
        _aten.pow.Tensor_Scalar: torch.pow,
        _aten.rsqrt.default: torch.rsqrt,
        _aten.sin.default: torch.sin,
        _aten.split_with_sizes.default: torch.split_with_sizes,
        _aten.sub.Tensor: torch.sub,
        _aten.sum.IntList_out: torch.sum,
        _aten.sum.dim_IntList: torch.sum,
        _aten.t.default: torch.t,
        _aten.tanh.default: torch.tanh,
        _aten.transpose.int: torch.transpose,
        _aten.unsqueeze.default: torch.unsqueeze,
    }
)
"""From an operator to the function of torch that computes the same result."""


def call_directly(graph_module: fx.GraphModule) -> None:
    """Replace calls of operators in `FUNCTIONS` and `METHODS` by calls of torch's functions and methods, in place."""
    for node in graph_module.graph.nodes:
        if not node.args or isinstance(node.args[0], int | float):
            continue  # operators take a number for a tensor
        if node.target in METHODS:
            node.op, node.target = "call_method", METHODS[node.target]
        elif node.target in FUNCTIONS:
            node.target = FUNCTIONS[node.target]
    graph_module.recompile()
