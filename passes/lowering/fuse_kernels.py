"""Replaces operators of a lowered program by hand-written Triton kernels.

Before → after, for a group of calls: `mul(silu(gate), up)` → `triton_gated(gate, up, "silu")`. Before → after, for a
single call: `dropout(x, ...)` → `triton_dropout(x, ...)`. `autoshard.kernels.registry` has the kernels of both kinds. A
*form* is one way to write the computation of a kernel as calls (`autoshard.kernels.kernel.Form`).

A group of calls in a kernel's form is replaced if

1. the kernel takes the operands (dtypes, shapes), and its results have the right shapes and dtypes;
2. the operands exist before the first reader of a result;
3. at least two launches are saved. One is enough if a backward's kernel recomputes a value that the forward saved. The
   forward's value may then join another group.

If calls outside the group read a value inside it, the value is still computed for them. The kernel then computes it a
second time. If the value is expensive, the group is not replaced (`FusedKernel.allowed_readers`).

The pass works on the program before it is cut into phases. A kernel of the backward may recompute values, which the
forward then need not save. Results keep the names of the replaced nodes. `passes.verification.expand_kernels` inverts
the rewrite for verification.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from autoshard.graphs.lazy_module import lazy_module
from autoshard.ir.lowered import LoweredProgram
from autoshard.kernels.kernel import FusedKernel
from autoshard.kernels.launch import why_not
from autoshard.kernels.registry import FUSED, KERNELS, find_kernel
from passes.lowering.count_launches import is_launch, may_alias, sends
from passes.lowering.match_form import Match, Pattern, find_matches, root_operator, trace_form
from passes.preparation.number_values import Numbering, number_graph
from passes.verification.expand_kernels import FORM, STANDS_FOR

_NEAREST = 32
"""Number of calls, the nearest first, that are tried as a further result of a group."""
_ATTEMPTS = 8
"""Greatest number of matches that are tried for one call as the first result of a kernel."""


@dataclass(frozen=True, slots=True)
class FuseKernels:
    """Replaces groups of calls, and then single calls, by Triton kernels.

    The `kernels` are tried in their order, and the first that fits is taken.
    """

    kernels: Sequence[FusedKernel] = FUSED

    def __call__(self, lowered: LoweredProgram) -> LoweredProgram:
        """Return a copy of the program with kernels. Its field `without_kernels` is `lowered`, for verification."""
        return replace(lowered, graph_module=self.fuse(lowered.graph_module), without_kernels=lowered)

    def fuse(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        """Return a copy of a graph on the tensors of one rank, in which kernels replace calls."""
        fusion = _FusedGraph(_copy(graph_module, {}))
        for kernel in self.kernels:
            for form in range(len(kernel.forms)):
                fusion.apply(kernel, form)
        for node in fusion.graph_module.graph.nodes:
            if node.target in KERNELS:
                args, kwargs = fx.map_arg((node.args, node.kwargs), _value_of)
                node.target = find_kernel(node.target, args, kwargs) or node.target
        _drop_views(fusion.graph_module.graph)
        return _copy(fusion.graph_module, fusion.names)


def _copy(graph_module: fx.GraphModule, names: Mapping[fx.Node, str]) -> fx.GraphModule:
    """Return a copy of a graph module with new names for the nodes in `names`. All other nodes keep their names."""
    graph = fx.Graph()
    environment: dict[fx.Node, fx.Node] = {}
    for node in graph_module.graph.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), environment.__getitem__)
        name = names.get(node, node.name)
        copied = environment[node] = graph.create_node(node.op, node.target, args, kwargs, name, node.type)
        copied.meta = dict(node.meta)
    return lazy_module(graph_module, graph)


def _drop_views(graph: fx.Graph) -> None:
    """Remove views and `getitem` nodes that no node reads, so that the forward does not save their operands."""
    for node in reversed(graph.nodes):
        names_only = may_alias(node) or not isinstance(node.target, OpOverload)
        if node.op == "call_function" and not node.users and names_only and not sends(node):
            graph.erase_node(node)


@dataclass(frozen=True, slots=True)
class _ReplacedCalls:
    """Calls that a kernel is about to replace.

    Args:
        match: value numbers of the calls (`passes.lowering.match_form`).
        results: for each result of the kernel, the nodes that compute this value now.
        going: the nodes that are removed, because no remaining node reads them once the kernel computes the results.
        first_reader: the first node that reads a result.
        spares: whether the kernel recomputes a value of another phase, such as the forward. That value then need not be
            saved.
    """

    match: Match
    results: tuple[tuple[fx.Node, ...], ...]
    going: frozenset[fx.Node]
    first_reader: fx.Node
    spares: bool


@dataclass(slots=True)
class _FusedGraph:
    """A graph in which kernels replace calls one after the other.

    Args:
        graph_module: the graph, which changes.
        names: final names of the inserted nodes. They are the names of the replaced nodes.
        numbering: value number of every node that is or was in the graph. Equal values have equal numbers.
        nodes: the present nodes with each value number.
        places: index of each node in the original graph; an inserted node has the index of the node it replaces.
    """

    graph_module: fx.GraphModule
    names: dict[fx.Node, str] = field(default_factory=dict)
    numbering: Numbering = field(init=False)
    nodes: defaultdict[int, list[fx.Node]] = field(default_factory=lambda: defaultdict(list))
    places: dict[fx.Node, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.numbering = number_graph(self.graph_module)
        for place, (node, number) in enumerate(self.numbering.numbers.items()):
            self.places[node] = place
            self.nodes[number].append(node)

    def apply(self, kernel: FusedKernel, form: int) -> None:
        """Replace every group of calls that is in a form of `kernel`, if this is legal and saves launches.

        `form` is the index of the form in `kernel.forms`.
        """
        patterns: dict[tuple[object, ...], Pattern] = {}
        by_target: defaultdict[Any, list[fx.Node]] = defaultdict(list)
        for node in self.graph_module.graph.nodes:
            by_target[node.target].append(node)
        for anchor in list(self.graph_module.graph.nodes):
            like = _value_of(anchor)
            if not isinstance(like, Tensor) or not kernel.forms[form].may_yield(like):
                continue
            if anchor.target is not root_operator(kernel.forms[form], like.dtype) or not self._is_there(anchor):
                continue
            signature = (tuple(like.shape), like.dtype, like.device)
            if signature not in patterns:
                patterns[signature] = trace_form(kernel.forms[form], like)
            matches = self._matches(patterns[signature], anchor, by_target)
            any(self._replace(kernel, form, match, anchor) for match in islice(matches, _ATTEMPTS))

    def _matches(
        self, pattern: Pattern, anchor: fx.Node, by_target: Mapping[Any, Sequence[fx.Node]]
    ) -> Iterator[Match]:
        def candidates(target: Any) -> Iterator[int]:
            here = [node for node in by_target.get(target, ()) if self._is_there(node) and _is_beside(node, anchor)]
            nearest = sorted(here, key=lambda node: abs(self.places[node] - self.places[anchor]))
            return (self.numbering.numbers[node] for node in nearest[:_NEAREST])

        return find_matches(pattern, self.numbering, self.numbering.numbers[anchor], candidates)

    def _is_there(self, node: fx.Node) -> bool:
        return node in self.nodes[self.numbering.numbers[node]]

    def _replace(self, kernel: FusedKernel, form: int, match: Match, anchor: fx.Node) -> bool:
        """Replace a group of calls by the kernel, and return whether this was legal and saves launches.

        `anchor` is the node that computes the group's first result before the replacement.
        """
        group = self._group(match, anchor)
        arguments = None if group is None else self._arguments(kernel, form, group, anchor)
        if group is None or arguments is None:
            return False
        fakes = fx.map_arg(arguments, _value_of)
        if why_not(kernel.operator, *fakes) is not None:
            return False
        made = kernel.operator(*fakes)
        values = made if isinstance(made, tuple) else (made,)
        if not all(_fits(value, nodes) for value, nodes in zip(values, group.results, strict=True)):
            return False
        if sum(map(is_launch, group.going)) < (1 if group.spares else 2) or not self._spares_dear_values(kernel, group):
            return False
        call = self._insert(kernel, arguments, anchor)
        call.meta |= {"val": made, FORM: form, STANDS_FOR: tuple(node.name for node in sorted(group.going))}
        self._take_over(group, call, values)
        return True

    def _group(self, match: Match, anchor: fx.Node) -> _ReplacedCalls | None:
        results = tuple(
            () if number is None else tuple(node for node in self.nodes[number] if _is_beside(node, anchor))
            for number in match.results
        )
        held = {node for nodes in results for node in nodes}
        going: set[fx.Node] = set()
        inner = {node for number in match.inner for node in self.nodes[number]}
        for node in sorted(inner, reverse=True):
            if node in held or all(user in going for user in node.users):
                going.add(node)
        readers = {user for node in held for user in node.users} - going
        spares = any(is_launch(node) and not _is_beside(node, anchor) for node in inner - going)
        return _ReplacedCalls(match, results, frozenset(going), min(readers), spares) if readers else None

    def _arguments(
        self, kernel: FusedKernel, form: int, group: _ReplacedCalls, anchor: fx.Node
    ) -> tuple[Any, ...] | None:
        """Return the arguments of the kernel's call, or None if the call is impossible.

        If several nodes have an operand's value, the last of these nodes before the first reader of a result is taken.
        The call is impossible if no node comes before that reader, or if the program has a number in place of a tensor.
        For example, the 1 of `linear(x) + 1` is no bias.
        """
        values = dict(group.match.variables)
        for name, value in values.items():
            if not isinstance(value, tuple):
                continue
            there = [node for node in self.nodes[value[0]] if node < group.first_reader and node not in group.going]
            if not there:
                return None
            values[name] = max(there)
        values |= kernel.forms[form].constants(anchor.meta["val"])
        if any(isinstance(values[name], (int, float)) for name in kernel.tensors):
            return None
        arguments: dict[str, Any] = {name: values[name] for name in kernel.parameters}
        fakes = fx.map_arg(arguments, _value_of)
        derived = {name: compute(fakes) for name, compute in kernel.forms[form].derived_variables.items()}
        return tuple(arguments.values()) if all(values[name] == value for name, value in derived.items()) else None

    def _spares_dear_values(self, kernel: FusedKernel, group: _ReplacedCalls) -> bool:
        """Whether the kernel may compute inner values of the group that calls outside the group also read.

        Such values are computed twice, so `kernel.allowed_readers` must have all these calls.
        """
        if kernel.allowed_readers is None:
            return True
        inner = {node for number in group.match.inner for node in self.nodes[number]}
        readers = {user for node in inner - group.going for user in node.users} - inner
        return all(reader.target in kernel.allowed_readers for reader in readers)

    def _insert(self, kernel: FusedKernel, arguments: tuple[Any, ...], anchor: fx.Node) -> fx.Node:
        """Insert the kernel's call right after its last operand, and return it."""
        graph = self.graph_module.graph
        last = max(item for item in arguments if isinstance(item, fx.Node))
        if last.op == "placeholder":
            last = max(node for node in graph.nodes if node.op == "placeholder")
        with graph.inserting_after(last):
            call = graph.create_node("call_function", kernel.operator, arguments)
        call.meta = dict(anchor.meta)
        return call

    def _take_over(self, group: _ReplacedCalls, call: fx.Node, values: Sequence[Any]) -> None:
        """Let the readers of the group's results read the kernel's `call`, and remove the nodes in `group.going`.

        `values` has the kernel's results as fake tensors.
        """
        graph = self.graph_module.graph
        for index, (number, nodes) in enumerate(zip(group.match.results, group.results, strict=True)):
            if number is None or not nodes:
                continue
            made = call
            if isinstance(call.meta["val"], tuple):
                with graph.inserting_after(call):
                    made = graph.create_node("call_function", operator.getitem, (call, index))
                made.meta = {**nodes[0].meta, "val": values[index]}
            self.names[made] = nodes[0].name
            self.numbering.numbers[made] = number
            self.places[made] = self.places[nodes[0]]
            self.nodes[number].append(made)
            for node in nodes:
                node.replace_all_uses_with(made)
        for node in sorted(group.going, reverse=True):
            self.nodes[self.numbering.numbers[node]].remove(node)
            graph.erase_node(node)


def _value_of(node: fx.Node) -> Any:
    return node.meta.get("val")


def _is_beside(node: fx.Node, other: fx.Node) -> bool:
    return node.meta.get("phase") == other.meta.get("phase")


def _fits(value: Tensor | None, nodes: Collection[fx.Node]) -> bool:
    """Whether a kernel's result `value` can replace the values of `nodes`.

    The result must have the shape of the nodes' values, and their dtype or float32. None stands for a result that the
    kernel does not compute; it cannot replace any node.
    """
    held = [_value_of(node) for node in nodes]
    if value is None:
        return not held
    return all(value.shape == item.shape and value.dtype in (item.dtype, torch.float32) for item in held)
