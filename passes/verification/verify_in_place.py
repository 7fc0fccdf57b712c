"""Verifies that a graph which writes over inputs or into buckets computes the results of the functional graph.

The functional graph gets value numbers (`passes.preparation.number_values`). The graph that writes is then walked with
a model of memory. Every node has a value number and a place in memory, which it shares with its possible aliases. A
write gives the written node a new number, and makes all other nodes at its place stale. The walk checks that

* no stale node is read or returned;
* a collective's operand is not written before the wait. (On three Gloo ranks or more, an all-reduce sends views of it.)
* every call is a call of the functional graph, and the results have the numbers of its results;
* only the intended inputs are written.

Tests of kernels show that an in-place operator computes the results of the functional operator. Placeholders
(parameters, state and values of one program) are assumed not to alias each other. Before the walk, joined updates are
expanded (`expand_buckets`), and filled buckets of gradients become a `cat` again (`pack_buckets`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from autoshard.errors import VerificationError
from autoshard.graphs.aliases import aliased_operands
from autoshard.ir.collectives import is_collective, is_wait
from autoshard.kernels.optimizers import IN_PLACE
from passes.preparation.number_values import Numbering, call_key
from passes.verification.check_computed import check_computed
from passes.verification.expand_buckets import expand_buckets
from passes.verification.pack_buckets import pack_buckets, shaped_alike

_aten = torch.ops.aten
_FUNCTIONAL: Mapping[Any, Any] = MappingProxyType({twin: update for update, twin in IN_PLACE.items()})
"""The functional operator of each in-place operator of ours."""


def verify_in_place(before: fx.GraphModule, after: fx.GraphModule, written: Mapping[int, int]) -> None:
    """Prove that `after` returns the results of the functional graph `before`, some of them written over inputs.

    Args:
        written: for each result that is written over an input, the index of the input's placeholder, by the index of
            the result.

    Raises:
        VerificationError: a value is read after it was overwritten, a result has another value or place, or another
            input is written. The message names the node.
    """
    check_computed(after.graph)
    packed = pack_buckets(after)
    if packed is not after:
        before = shaped_alike(before)
    _WrittenMemory(before, expand_buckets(packed), written).run()


@dataclass(slots=True)
class _WrittenMemory:
    """The content of memory during the walk through the graph that writes.

    A place is named by the node that first had a value there.

    Args:
        written: index of the overwritten placeholder, by index of the result.
        numbering: the value numbers of the functional graph. A plain clone has the number of its operand.
        content: value number of each walked node.
        places: for each walked node, the places at which its value may lie.
        versions: for each walked node and place, the number of writes to the place when the node's value was made. The
            node is stale if the place has more writes now.
        writes: number of writes to each place so far.
        sent: for each started collective and place of its operand, the number of writes to the place at the start.
    """

    before: fx.GraphModule
    after: fx.GraphModule
    written: Mapping[int, int]
    numbering: Numbering = field(default_factory=Numbering)
    content: dict[fx.Node, int] = field(default_factory=dict)
    places: dict[fx.Node, frozenset[fx.Node]] = field(default_factory=dict)
    versions: dict[fx.Node, dict[fx.Node, int]] = field(default_factory=dict)
    writes: dict[fx.Node, int] = field(default_factory=dict)
    sent: dict[fx.Node, dict[fx.Node, int]] = field(default_factory=dict)

    def run(self) -> None:
        expected = self._number_functional()
        known = len(self.numbering.nodes)
        self.numbering.restart_draws()
        placeholders: list[fx.Node] = []
        for node in self.after.graph.nodes:
            if node.op == "placeholder":
                self._hold(node, self.numbering.keys["placeholder", len(placeholders)])
                placeholders.append(node)
            elif node.op != "output":
                self._step(node, known)
        self._check_results(expected, placeholders)

    def _number_functional(self) -> list[int | None]:
        placeholders = 0
        for node in self.before.graph.nodes:
            if node.op == "placeholder":
                self.numbering.add(node, ("placeholder", placeholders))
                placeholders += 1
            elif _is_copy(node):
                self.numbering.numbers[node] = self.numbering.numbers[node.args[0]]  # type: ignore[index]
            elif node.op != "output":
                self.numbering.add_node(node, self.before)
        return [_number(self.numbering, item) for item in _results(self.before)]

    def _step(self, node: fx.Node, known: int) -> None:
        overwritten = node.args[0] if node.target is _aten.copy_.default else None
        for operand in node.all_input_nodes:
            if operand is not overwritten:
                self._check_fresh(operand, node)
        if is_collective(node):
            places = frozenset[fx.Node]().union(*(self.places[operand] for operand in node.all_input_nodes))
            self.sent[node] = {place: self.writes[place] for place in places}
        elif is_wait(node):
            self._check_sent(node)
        if overwritten is not None:
            self._copy(node)
        elif any(written_operands(node)):
            self._update(node)
        elif _is_copy(node):
            self._hold(node, self.content[node.args[0]])  # type: ignore[index]
        else:
            self.numbering.numbers.update(self.content)
            if self.numbering.add_node(node, self.after) >= known:
                raise _wrong(node, "is no call of the functional graph")
            shared = (self.places[operand] for operand in aliased_operands(node))
            self._hold(node, self.numbering.numbers[node], frozenset().union(*shared))

    def _copy(self, node: fx.Node) -> None:
        target, source = node.args[:2]
        assert isinstance(target, fx.Node)
        assert isinstance(source, fx.Node)
        if target not in self.places:
            raise _wrong(node, f"writes over {target.name!r}, which yields no value")
        if self.places[target] & self.places[source]:
            raise _wrong(node, "copies a value over memory that it may share")
        self._write(target, self.content[source])

    def _update(self, node: fx.Node) -> None:
        """Walk an in-place operator.

        The operands that it writes get the value numbers of the results of the functional operator.
        """
        overwritten = list(written_operands(node))
        operands: list[fx.Node] = []
        fx.map_arg((node.args, node.kwargs), operands.append)  # repeated where a value is used twice
        places = Counter(place for operand in operands for place in self.places[operand])
        if any(places[place] > 1 for operand in overwritten for place in self.places[operand]):
            raise _wrong(node, "writes over memory that another of its operands may share")
        key = call_key(node.op, _FUNCTIONAL.get(node.target), node.args, node.kwargs, self.content.__getitem__)
        call = self.numbering.keys.get(key)
        if call is None:
            raise _wrong(node, "makes an update that the functional graph does not make")
        several = len(overwritten) > 1
        for index, operand in enumerate(overwritten):
            found = self.numbering.selection(call, index) if several else call
            self._write(operand, -1 if found is None else found)

    def _write(self, target: fx.Node, number: int) -> None:
        for place in self.places[target]:
            self.writes[place] += 1
        self.content[target] = number
        self.versions[target] = {place: self.writes[place] for place in self.places[target]}

    def _hold(self, node: fx.Node, number: int, shared: frozenset[fx.Node] = frozenset()) -> None:
        """Record the value number of a node, and its places in memory.

        The places are `shared`. If `shared` is empty, the node has a new place of its own.
        """
        self.content[node], self.places[node] = number, shared or frozenset({node})
        self.versions[node] = {place: self.writes.setdefault(place, 0) for place in self.places[node]}

    def _check_fresh(self, operand: fx.Node, reader: fx.Node) -> None:
        if operand not in self.content:
            raise _wrong(reader, f"reads {operand.name!r}, which yields no value")
        if any(self.writes[place] != version for place, version in self.versions[operand].items()):
            raise _wrong(reader, f"reads {operand.name!r} after its memory was written over")

    def _check_sent(self, wait: fx.Node) -> None:
        (collective,) = wait.all_input_nodes
        if any(self.writes[place] != writes for place, writes in self.sent.get(collective, {}).items()):
            raise _wrong(wait, f"waits for {collective.name!r}, whose operand was written over meanwhile")

    def _check_results(self, expected: list[int | None], placeholders: list[fx.Node]) -> None:
        output = self.after.graph.output_node()
        results = _results(self.after)
        if len(results) != len(expected):
            raise _wrong(output, f"returns {len(results)} values; the functional graph returns {len(expected)}")
        for index, (result, due) in enumerate(zip(results, expected, strict=True)):
            if isinstance(result, fx.Node):
                self._check_fresh(result, output)
            if (self.content[result] if isinstance(result, fx.Node) else None) != due:
                raise _wrong(output, f"returns {result!s} as result {index}, which is another value")
            if index in self.written and result is not placeholders[self.written[index]]:
                raise _wrong(output, f"returns {result!s} as result {index}, which lies elsewhere than its input")
        meant = {placeholders[place] for place in self.written.values()}
        for node in placeholders:
            if self.writes[node] and node not in meant:
                raise _wrong(node, "is an input that nothing may be written over")


def _is_copy(node: fx.Node) -> bool:
    return node.target is _aten.clone.default and not node.kwargs


def written_operands(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the operands that a call writes by its operator's schema, in order."""
    if isinstance(node.target, torch._ops.OpOverload):
        for argument, operand in zip(node.target._schema.arguments, node.args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(operand, fx.Node):
                yield operand


def _number(numbering: Numbering, result: Any) -> int | None:
    return numbering.numbers[result] if isinstance(result, fx.Node) else None


def _results(graph_module: fx.GraphModule) -> list[Any]:
    results = graph_module.graph.output_node().args[0]
    return list(results) if isinstance(results, (tuple, list)) else [results]


def _wrong(node: fx.Node, what: str) -> VerificationError:
    return VerificationError(f"node {node.name!r}, {node.format_node()}, {what}.")
