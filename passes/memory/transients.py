"""What is in memory only while a value is resharded, or while a call runs: found by emitting it and walking through it.

A reshard of several steps holds two values at a time, and some steps put pieces in order in a copy of their own. A call
that is rewritten for a split factor (masks, offsets, filled padding) makes values that nobody else sees.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from autoshard.ir.mesh import Mesh
from autoshard.ir.reshard import ReshardKind, ReshardStep, StepCost, plan_reshard
from autoshard.ir.spec import PartitionSpec
from autoshard.rules.emit_local import fills, in_order
from autoshard.rules.enumeration import Strategy
from autoshard.rules.hub import hub
from passes.memory.storages import Storages, Value
from passes.memory.workspaces import has_workspace
from passes.strategies.enumerate_strategies import Site, operands_of
from passes.strategies.price import local_bytes
from passes.strategies.scratch import emitted_call, emitted_reshard


class _Growth(NamedTuple):
    """Of some steps: most bytes beside the operand if it stays, most with it if it goes, bytes of what they make."""

    beside: int
    with_operand: int
    after: int


@dataclass(frozen=True, slots=True)
class Moved:
    """A reshard, and what of its operand decides how much memory it needs.

    Args:
        value: the value as the trace has it, of global shape.
        source, target: specs before and after.
        as_traced: on each rank its dims lie in memory in the order that they have in the trace; else as they come.
        size: bytes of the storage that it lies in on each rank; None: its own.
    """

    value: torch.Tensor
    source: PartitionSpec
    target: PartitionSpec
    as_traced: bool = True
    size: int | None = None

    def before(self, mesh: Mesh) -> int:
        """Bytes in memory before the reshard."""
        if self.size is not None:
            return self.size
        return math.prod(self.source.local_shape(self.value.shape, mesh)) * self.value.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class RewrittenForm:
    """What a rank runs for a call that is rewritten, and where its results lie.

    Args:
        graph: from the call's operands to its results.
        results: of each result the number of its storage: that of an operand, or, behind these, of one that is made;
            None for one that nothing reads.
        made: the bytes of those, by number.
        reads: whether it reads each operand.
    """

    graph: fx.Graph
    results: tuple[int | None, ...]
    made: Mapping[int, int]
    reads: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Transients:
    """Bytes that reshards and calls need for a moment, found once each.

    Args:
        mesh: of the program.
        cost: decides between reshards of equal effect, as in `plan_reshard`; None goes by bytes sent.
    """

    mesh: Mesh
    cost: StepCost | None = None
    _growths: dict[Any, _Growth] = field(default_factory=dict, repr=False)
    _forms: dict[Any, RewrittenForm] = field(default_factory=dict, repr=False)
    _peaks: dict[Any, int] = field(default_factory=dict, repr=False)

    def of_reshard(self, moved: Moved, *, freed: bool) -> int:
        """The most bytes beside a reshard's operand while it is made.

        Args:
            moved: the reshard.
            freed: the operand goes once it is read, and what it took may be used again.
        """
        growths = self._reshard(moved)
        if not growths:
            return 0
        gone = moved.before(self.mesh) if freed else 0
        first = growths[0].with_operand - gone if freed else growths[0].beside
        return max(first, *(growth.with_operand - gone for growth in growths[1:]), growths[-1].after - gone)

    def bytes_of_copy(self, moved: Moved) -> int:
        """What a reshard makes takes: of uneven dims also what is cut off, where no copy is made for that."""
        growths = self._reshard(moved)
        return growths[-1].after if growths else moved.before(self.mesh)

    def of_call(self, site: Site, strategy: Strategy) -> int:
        """The most bytes beside a call's operands and results while it runs."""
        form = self.local_form(site, strategy, strides=strides_in_trace(site))
        if form is None:
            return 0
        sizes = _operand_bytes(form)
        peak = self._peak(form, tuple(range(len(sizes))), sizes, (False,) * len(sizes))
        results = sum(local_bytes(*result, self.mesh) for result in zip(site.results, strategy.outputs, strict=True))
        return max(0, peak - sum(sizes) - (0 if site.is_alias else results))

    def local_form(
        self,
        site: Site,
        strategy: Strategy,
        unread: frozenset[int] = frozenset(),
        strides: Mapping[int, tuple[int, ...]] | None = None,
    ) -> RewrittenForm | None:
        """Local graph of a call, where nothing reads some of its results; None for no more than operands and results.

        Args:
            site: the call.
            strategy: what it runs under.
            unread: the results that nothing reads.
            strides: of operands whose dims lie in memory in the order that these have; others lie as they come.
        """
        if site.node is None or site.node.op != "call_function" or site.node.target is hub:
            return None
        lying = tuple(strides.items()) if strides and in_order(site.node.target) else ()
        splits = strategy.splits(self.mesh)
        is_rewritten = splits and site.rule and (site.rule.local or fills(site.rule, splits, self.mesh))
        if not is_rewritten and not lying and not has_workspace(site.node):
            return None
        key = (site.call, strategy, unread, lying)
        if key not in self._forms:
            self._forms[key] = _local_form(site, strategy, self.mesh, unread, dict(lying))
        return self._forms[key]

    def beside(
        self, form: RewrittenForm, operands: tuple[int, ...], sizes: tuple[int, ...], gone: tuple[bool, ...]
    ) -> int:
        """The most bytes beside operands and results while a call runs; below zero if operands go early.

        Args:
            form: what runs.
            operands: the number of the storage that each operand lies in.
            sizes, gone: of each of these storages, its bytes, and whether it goes after its last use here.
        """
        return self._peak(form, operands, sizes, gone) - sum(sizes) - sum(form.made.values())

    def _peak(
        self, form: RewrittenForm, operands: tuple[int, ...], sizes: tuple[int, ...], gone: tuple[bool, ...]
    ) -> int:
        key = (form, operands, sizes, gone)
        if key not in self._peaks:
            storages = Storages()
            given = [storages.new(size) for size in sizes]
            staying = [storage for storage, goes in zip(given, gone, strict=True) if not goes]
            storages.run(form.graph, [given[number] for number in operands], staying)
            self._peaks[key] = storages.peak
        return self._peaks[key]

    def _reshard(self, moved: Moved) -> list[_Growth]:
        """What the parts of a reshard need, one after the other."""
        value, shape = moved.value, tuple(moved.value.shape)
        steps = plan_reshard(
            moved.source, moved.target, shape, self.mesh, itemsize=value.dtype.itemsize, cost=self.cost
        )
        growths: list[_Growth] = []
        size, as_traced = moved.before(self.mesh), moved.as_traced
        for part in _parts([step for step in steps if step.axis_size > 1]):
            growths.append(self._growth(value, part, size, as_traced))
            size, as_traced = growths[-1].after, False
        return growths

    def _growth(self, value: torch.Tensor, steps: tuple[ReshardStep, ...], before: int, as_traced: bool) -> _Growth:
        as_traced = as_traced and not value.is_contiguous()
        key = (steps, tuple(value.shape), value.dtype, before, value.stride() if as_traced else None)
        if key not in self._growths:
            graph = emitted_reshard(value, steps, self.mesh, as_traced=as_traced)
            staying, going = Storages(), Storages()
            operand = staying.new(before)
            staying.run(graph, [operand], [operand])
            after = going.run(graph, [going.new(before)])
            self._growths[key] = _Growth(staying.peak - before, going.peak, going.bytes_of(after))
        return self._growths[key]


def _parts(steps: Sequence[ReshardStep]) -> Iterator[tuple[ReshardStep, ...]]:
    """Steps that are counted together: a slice that is not the last step is a view, for the step behind it."""
    part: list[ReshardStep] = []
    for step in steps:
        part.append(step)
        if step.kind is not ReshardKind.SLICE:
            yield tuple(part)
            part = []
    if part:
        yield tuple(part)


def strides_in_trace(site: Site) -> dict[int, tuple[int, ...]]:
    """The strides of operands that are not contiguous in the trace, of a call that makes them so."""
    if site.node is None or not in_order(site.node.target):
        return {}
    values = [operand.meta["val"] for operand in operands_of(site.node)]
    return {index: value.stride() for index, value in enumerate(values) if not value.is_contiguous()}


def _local_form(
    site: Site, strategy: Strategy, mesh: Mesh, unread: frozenset[int], strides: Mapping[int, tuple[int, ...]]
) -> RewrittenForm:
    graph, count = emitted_call(site, strategy, mesh, strides), len(site.results)
    kept = range(count)
    values: Any = graph.output_node().args[0]
    if len(values) == count and unread:
        kept = [number for number in range(count) if number not in unread]
        graph.output_node().args = (tuple(values[number] for number in kept),)
        graph.eliminate_dead_code()
    storages = Storages()
    operands = [storages.new(0) for node in graph.nodes if node.op == "placeholder"]
    results = storages.run(graph, operands)
    if len(results) == 1 < len(kept):  # one value that holds them all
        found = _of_tensors(graph, results[0], count)
    else:
        found = tuple(value[0] for value in results)
    numbers = {storage: number for number, storage in enumerate(dict.fromkeys((*(one for (one,) in operands), *found)))}
    made = {numbers[storage]: storage.size for storage in found if numbers[storage] >= len(operands)}
    reads = tuple(bool(node.users) for node in graph.nodes if node.op == "placeholder")
    where = {result: numbers[storage] for result, storage in zip(kept, found, strict=True)}
    return RewrittenForm(graph, tuple(map(where.get, range(count))), made, reads)


def _of_tensors(graph: fx.Graph, value: Value, count: int) -> Value:
    """The storages of the tensors among several results of an operator."""
    if len(value) == 1:
        return value * count
    (values,) = (node.meta["val"] for node in graph.output_node().all_input_nodes)
    return tuple(storage for storage, item in zip(value, values, strict=True) if isinstance(item, torch.Tensor))


def _operand_bytes(form: RewrittenForm) -> tuple[int, ...]:
    values = (node.meta["val"] for node in form.graph.nodes if node.op == "placeholder")
    return tuple(value.numel() * value.element_size() for value in values)
