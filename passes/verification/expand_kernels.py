"""Expands kernels into the calls that they replace, so that a program with kernels can be compared with one without.

Before → after: `triton_gated(gate, up, "silu")` → `mul(silu(gate), up)`; `triton_layer_norm(x, ...)` →
`native_layer_norm(x, ...)`; a generated kernel → the calls of its group.

A fused kernel has several forms: ways to write its computation as calls. `meta["form"]` is the index of the form to
expand to. The kernel computes every form, so a wrong index can make a comparison fail, but never succeed.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.proxy import GraphAppendingTracer

from autoshard.errors import VerificationError
from autoshard.graphs.copy_nodes import copy_node
from autoshard.graphs.lazy_module import lazy_module
from autoshard.kernels.generated.define import generated_kernel
from autoshard.kernels.generated.group import Group
from autoshard.kernels.kernel import FusedKernel
from autoshard.kernels.registry import FUSED, KERNELS
from passes.verification.check_computed import check_computed

FORM = "form"
"""Key of `node.meta` of a fused kernel's call: the index of its form in `FusedKernel.forms`."""

STANDS_FOR = "stands_for"
"""Key of `node.meta` of a kernel's call: the names of the nodes that it replaces; absent for single operators."""

_FUSED = {kernel.operator: kernel for kernel in FUSED}
_ORIGINALS: dict[OpOverload, OpOverload] = {kernel: operator for operator, kernel in KERNELS.items()}


def is_kernel(node: fx.Node) -> bool:
    """Whether a node calls one of our kernels, which `expand_kernels` expands."""
    is_fused = node.target in _FUSED and FORM in node.meta
    return is_fused or node.target in _ORIGINALS or generated_kernel(node.target) is not None


def expand_kernels(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a graph in which the replaced calls stand in place of each kernel.

    Raises:
        VerificationError: a kernel's arguments do not fit its form, or a node reads a value before its computation.
    """
    check_computed(graph_module.graph)
    graph = fx.Graph()
    environment: dict[fx.Node, fx.Node] = {}
    results: dict[fx.Node, tuple[fx.Node | None, ...]] = {}
    for node in graph_module.graph.nodes:
        generated = generated_kernel(node.target)
        if generated is not None or (node.target in _FUSED and FORM in node.meta):
            written = _write_out if generated is None else partial(_write_group, generated.group)
            results[node] = written(graph, node, environment)
            if isinstance(node.meta["val"], Tensor):
                environment[node] = _result(node, results[node][0])
        elif node.target is operator.getitem and node.args[0] in results:
            environment[node] = _result(node, results[node.args[0]][node.args[1]])
        else:
            copied = environment[node] = copy_node(graph, node, environment.__getitem__)
            if isinstance(node.target, OpOverload):
                copied.target = _ORIGINALS.get(node.target, node.target)
    return lazy_module(graph_module, graph)


def _result(node: fx.Node, result: fx.Node | None) -> fx.Node:
    if result is None:
        raise VerificationError(f"node {node.name!r} reads a result that its kernel's form does not have.")
    return result


def _write_group(
    group: Group, graph: fx.Graph, node: fx.Node, environment: Mapping[fx.Node, fx.Node]
) -> tuple[fx.Node, ...]:
    """Append the calls of a generated kernel's group to `graph`, and return the nodes of the kernel's results.

    `node` is the call of the kernel. `environment` has the copy of each of its operands.

    Raises:
        VerificationError: the call has another number of operands than the group.
    """
    if len(node.args) != len(group.operands) or not all(isinstance(item, fx.Node) for item in node.args):
        raise VerificationError(
            f"node {node.name!r} calls {node.target} with {node.args}; it takes {len(group.operands)} operands."
        )
    values = [environment[item] for item in node.args if isinstance(item, fx.Node)]
    for step in group.steps:
        call = step.call(values.__getitem__, lambda *args, step=step, **kwargs: (step.target, args, kwargs))
        made = graph.call_function(*call)
        made.meta = {"phase": node.meta.get("phase"), "source": node.meta.get("source")}
        values.append(made)
    return tuple(values[index] for index in group.results)


def _write_out(graph: fx.Graph, node: fx.Node, environment: Mapping[fx.Node, fx.Node]) -> tuple[fx.Node | None, ...]:
    """Append the calls of a fused kernel's form to `graph`, and return the nodes of the kernel's results.

    A result that the form does not compute is None. `node` is the call of the kernel. `environment` has the copy of
    each of its operands.
    """
    target: Any = node.target
    kernel = _FUSED[target]
    form = kernel.forms[node.meta[FORM]]
    value = node.meta["val"]
    like = value if isinstance(value, Tensor) else value[0]
    arguments = dict(zip(kernel.parameters, node.args, strict=True))
    _check_constants(node, kernel, arguments, form.constants(like))
    fakes = fx.map_arg(arguments, lambda operand: operand.meta["val"])
    derived = {name: compute(fakes) for name, compute in form.derived_variables.items()}
    tracer = GraphAppendingTracer(graph)
    variables = {
        name: fx.Proxy(environment[argument], tracer) if isinstance(argument, fx.Node) else argument
        for name, argument in {**arguments, **derived}.items()
    }
    before = next(iter(reversed(graph.nodes)))
    results = tuple(None if proxy is None else proxy.node for proxy in form.results(like, variables))
    made = before.next
    while made.op != "root":
        made.meta = {"phase": node.meta.get("phase"), "source": node.meta.get("source")}
        made = made.next
    return results


def _check_constants(
    node: fx.Node, kernel: FusedKernel, arguments: Mapping[str, Any], constants: Mapping[str, object]
) -> None:
    wrong = {name: arguments[name] for name, value in constants.items() if arguments[name] != value}
    if wrong:
        raise VerificationError(
            f"node {node.name!r} calls {kernel.name} with {wrong}; its form {node.meta[FORM]} has {dict(constants)}."
        )
