"""Let Triton kernels stand in for operators of a lowered program.

Before → after: `native_layer_norm(x, ...)` → `triton_layer_norm(x, ...)`, and so for every call that a kernel of
`autoshard.kernels.registry` covers (same arguments, same results); other calls stay.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch._ops import OpOverload

from autoshard.kernels.registry import find_kernel, kernels_of


@dataclass(frozen=True, slots=True)
class FuseKernels:
    """See the module's docstring."""

    def __call__(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        """The graph with kernels, over a graph of its own."""
        graph = fx.Graph()
        environment: dict[fx.Node, fx.Node] = {}
        for node in graph_module.graph.nodes:
            copied = environment[node] = graph.node_copy(node, environment.__getitem__)
            copied.meta = dict(node.meta)
            if isinstance(node.target, OpOverload) and kernels_of(node.target):
                _replace(copied)
        return fx.GraphModule(graph_module, graph)


def fused_calls(graph_module: fx.GraphModule) -> Counter[str]:
    """How often each kernel is called, by the kernel's name."""
    names = (str(node.target) for node in graph_module.graph.nodes)
    return Counter(name for name in names if name.startswith("autoshard.triton_"))


def _replace(node: fx.Node) -> None:
    target: Any = node.target
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    kernel = find_kernel(target, args, kwargs)
    if kernel is not None:
        node.target = kernel.replacement
