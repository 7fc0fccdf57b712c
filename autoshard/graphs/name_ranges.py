"""Names the operators and collectives of a lowered graph, as ranges of torch's profiler and of NVTX.

`autoshard.ir.range_names` describes the names. Predictions name nodes by the same function, so measured and predicted
seconds are compared by name.

Before → after `name_ranges`: `y = mm(x, w)` → `token = begin("forward: mlp mm"); y = mm(x, w); end(token)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from autoshard.graphs.aliases import aliased_operands
from autoshard.ir.collectives import is_collective, is_wait
from autoshard.ir.communicators import group_axes
from autoshard.ir.range_names import ADDING, OVER, WAITING

IN_WORDS: Mapping[str, str] = {
    "all_gather_into_tensor": "all-gather",
    "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce",
    "all_to_all_single": "all-to-all",
    "reduce_scatter_tensor": "reduce-scatter",
}
"""From a collective operator of torch to its usual name."""

_NO_PHASE = "inputs and outputs"
_UPDATE = "update"
_ARITHMETIC = ("_operator", "builtins", "math")


def range_name(node: fx.Node, phase: str = _NO_PHASE) -> str:
    """Return the name of a node's range; "" for a node that does no work of its own, such as a view.

    `phase` is the phase of a node without `meta["phase"]`, such as "backward".
    """
    if node.op != "call_function":
        return ""
    issued = issued_by(node)
    collective = collective_of(issued)
    module = next((item.meta["module"] for item in (issued, node) if item.meta.get("module")), "")
    if collective:
        of = f" of {module}" if module else ""
        axes = ", ".join(group_axes(str(issued.meta.get("group") or issued.args[-1])))
        return f"{OVER}{axes}: {_verb(node)}{IN_WORDS.get(collective, collective)}{of}"
    if not _works(node):
        return ""
    phase = node.meta.get("phase") or phase
    named = module and phase != _UPDATE  # one call may update parameters of several modules
    return f"{phase}: {f'{module} ' if named else ''}{_operator(node)}"


def collective_of(node: fx.Node) -> str:
    """Return the name of the operator of the collective that a node starts or belongs to; "" for any other node."""
    return node.meta.get("collective") or (kind_of(node) if is_collective(node) else "")


def issued_by(node: fx.Node) -> fx.Node:
    """Return the collective that a wait waits for; any other node itself."""
    (operand,) = node.all_input_nodes if len(node.all_input_nodes) == 1 else (None,)
    return operand if is_wait(node) and operand is not None else node


def kind_of(node: fx.Node) -> str:
    """Return the name of a node's operator without namespace and overload, such as "all_reduce"."""
    return str(node.target).removeprefix("_c10d_functional.").partition(".")[0]


def phase_of(graph_module: fx.GraphModule) -> str:
    """Return the phase of a graph's first node that has a phase; `_NO_PHASE` if there is none."""
    phases = (node.meta["phase"] for node in graph_module.graph.nodes if node.meta.get("phase"))
    return next(phases, _NO_PHASE)


def name_ranges(graph_module: fx.GraphModule, begin: Callable[[str], Any], end: Callable[[Any], None]) -> None:
    """Put calls of `begin` and `end` around each node that has a range, in place.

    `begin` takes the name of the range, and returns an object for `end`.
    """
    phase = phase_of(graph_module)
    for node in list(graph_module.graph.nodes):
        phase = node.meta.get("phase", phase)
        name = range_name(node, phase)
        if not name:
            continue
        with graph_module.graph.inserting_before(node):
            token = graph_module.graph.call_function(begin, (name,))
        with graph_module.graph.inserting_after(node):
            graph_module.graph.call_function(end, (token,))
    graph_module.recompile()


def _verb(node: fx.Node) -> str:
    if is_wait(node):
        return WAITING
    return "" if is_collective(node) else ADDING


def _works(node: fx.Node) -> bool:
    """Whether a node starts a kernel: not a view, and no arithmetic on numbers."""
    if isinstance(node.target, torch._ops.OpOverload):
        is_view = not node.target._schema.is_mutable and bool(aliased_operands(node))
        return not is_view or node.target is torch.ops.aten.contiguous.default
    return "phase" in node.meta and getattr(node.target, "__module__", None) not in _ARITHMETIC


def _operator(node: fx.Node) -> str:
    """Return the name of a node's operator without namespace, overload and marks: "mm" for `aten.mm.out`.

    An operator that updates several parameters at once has the name of the operator for one parameter.
    """
    if isinstance(node.target, torch._ops.OpOverload):
        name = node.target._schema.name.partition("::")[2].strip("_")
        return name.removesuffix("s") if name.endswith("_updates") else name
    return str(getattr(node.target, "__name__", node.target)).strip("_")
