"""How many bytes values, reshards and calls take under each option of the variables that decide about them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np
import torch

from autoshard.ir.mesh import Mesh
from autoshard.ir.program import tensor_values
from autoshard.ir.spec import PartitionSpec
from autoshard.kernels.offload import to_host
from passes.memory.liveness import Held, OnLink
from passes.memory.memory_usage import Table
from passes.memory.transients import Moved, Transients, strides_in_trace
from passes.solver.assignment import Floats
from passes.strategies.enumerate_strategies import Link, SearchSpace, Site, ValueInfo, needs_of, specs_of
from passes.strategies.price import local_bytes_of


@dataclass(frozen=True, slots=True)
class MemoryTables:
    """The tables of a search space, made once for all that is alike.

    Args:
        space: the sites and links.
        transients: finds what is in memory only for a moment; goes by the reshards that lowering makes.
    """

    space: SearchSpace
    transients: Transients
    _tables: dict[Any, Table] = field(default_factory=dict, repr=False)

    def of_value(self, name: str, result: int, copies: float = 1.0) -> Table:
        """Bytes of a result by the option of its site, times `copies`."""
        site = self.space.sites[name]
        if is_on_host(site):
            return self._nothing(len(site.strategies))
        key = (site.results[result], id(site.strategies), result, copies)
        if key not in self._tables:
            sizes = local_bytes_of(site.results[result], specs_of(site, result), self.space.mesh)
            self._tables[key] = Table(sizes * copies)
        return self._tables[key]

    def of_call(self, name: str) -> Table:
        """Bytes that a call needs beside its operands and results by the option of its site."""
        site = self.space.sites[name]
        key = (site.call, id(site.strategies), *strides_in_trace(site).items())
        if key not in self._tables:
            sizes = np.full(len(site.strategies), np.nan)
            self._tables[key] = Table(sizes, lambda option: self.transients.of_call(site, site.strategies[option]))
        return self._tables[key]

    def on_link(self, kept: OnLink) -> Table:
        """Bytes of what a link keeps, by the options of its tail and head or of its head: see `Held`."""
        link = self.space.links[kept.link]
        tail, head = self.space.sites[link.tail], self.space.sites[link.head]
        if is_on_host(tail):
            return self._nothing(len(tail.strategies), len(head.strategies))
        value = tail.results[link.result]
        key = (value, id(tail.strategies), link.result, id(head.strategies), link.operand, kept.held)
        if key not in self._tables:
            self._tables[key] = self._link_table(link, kept.held)
        return self._tables[key]

    def _copy_table(self, link: Link, moved: np.ndarray, most: Floats, itself: Floats) -> Table:
        """Bytes of the copy that a reshard makes, found where padding may stay with it; without a reshard, `itself`."""
        tail, head = self.space.sites[link.tail], self.space.sites[link.head]
        value, traced = tail.results[link.result], traced_value(tail, link.result)
        sources, targets = specs_of(tail, link.result), needs_of(head, link)
        may_be_padded = most > local_bytes_of(value, targets, self.space.mesh)

        def find(row: int, column: int) -> float:
            return self.transients.bytes_of_copy(Moved(traced, sources[row], targets[column]))

        return Table(np.where(moved, np.where(may_be_padded, np.nan, most), itself), find)

    def _nothing(self, *options: int) -> Table:
        """The table of what takes no memory of the device."""
        key = ("nothing", *options)
        if key not in self._tables:
            self._tables[key] = Table(np.zeros(options))
        return self._tables[key]

    def _link_table(self, link: Link, held: Held) -> Table:
        tail, head = self.space.sites[link.tail], self.space.sites[link.head]
        value, mesh = tail.results[link.result], self.space.mesh
        sources, targets = specs_of(tail, link.result), needs_of(head, link)
        unpadded = local_bytes_of(value, targets, mesh)
        before, after = _most_bytes_of(value, sources, mesh)[:, None], _most_bytes_of(value, targets, mesh)
        if is_on_host(head) and held is Held.VALUE:
            return Table(np.broadcast_to(after, (len(sources), len(targets))))
        if is_on_host(head):
            return self._nothing(len(sources), len(targets))
        moved = differs(sources, targets, mesh)
        match held:
            case Held.COPY:
                return self._copy_table(link, moved, after, np.zeros(len(targets)))
            case Held.VALUE:
                return Table(np.where(moved, 0.0, after))
            case Held.EITHER if np.array_equal(after, unpadded):
                return Table(after)
            case Held.EITHER:
                itself = after if tail.is_alias else unpadded
                return self._copy_table(link, moved, after, itself)
            case Held.RETURNED:
                is_result = np.array([not spec.is_partial for spec in sources])
                return Table(np.where(moved & is_result[:, None], before, 0.0))
        traced = traced_value(tail, link.result)

        def find(row: int, column: int) -> float:
            freed = held is Held.LAST_RESHARD
            return self.transients.of_reshard(Moved(traced, sources[row], targets[column]), freed=freed)

        return Table(np.where(moved, np.nan, 0.0), find)


def is_on_host(site: Site) -> bool:
    """Whether a site's value lies on the host; it goes there as its owner has it, without a reshard."""
    return site.node is not None and site.node.target is to_host


def differs(sources: Sequence[PartitionSpec], targets: Sequence[PartitionSpec], mesh: Mesh) -> np.ndarray:
    """Whether each source is another layout than each target, [sources, targets]; axes of size one make none."""
    numbers: dict[PartitionSpec, int] = {}
    alone = {axis for axis, size in mesh.axes if size == 1}
    number = {
        spec: numbers.setdefault(_without(spec, alone) if alone else spec, len(numbers))
        for spec in dict.fromkeys((*sources, *targets))
    }
    before = np.array([number[spec] for spec in sources])
    after = np.array([number[spec] for spec in targets])
    return before[:, None] != after[None, :]


def _most_bytes_of(value: ValueInfo, specs: tuple[PartitionSpec, ...], mesh: Mesh) -> Floats:
    """The most bytes that a value takes under each spec, if it may be a copy: see `Transients.bytes_of_copy`."""
    if all(size == 1 or size % mesh.size == 0 for size in value.shape):
        return local_bytes_of(value, specs, mesh)
    sizes = {spec: _most_bytes(value, spec, mesh) for spec in dict.fromkeys(specs)}
    return np.array([sizes[spec] for spec in specs])


def _most_bytes(value: ValueInfo, spec: PartitionSpec, mesh: Mesh) -> float:
    """Bytes of a value, and the padding that pieces along its outermost dim had before they were put together."""
    local = spec.local_shape(value.shape, mesh)
    size = float(math.prod(local) * value.itemsize)
    outermost = next((dim for dim, count in enumerate(local) if count > 1), None)
    if outermost is None:
        return size
    axes = spec.axes_of(outermost)
    most = value.shape[outermost] // mesh.shards(axes)
    others = [count for axis, count in mesh.axes if axis not in axes]
    products = (math.prod(some) for number in range(len(others) + 1) for some in combinations(others, number))
    padded = (count * -(-local[outermost] // count) for count in products if count <= most)
    return size * max(padded, default=local[outermost]) / local[outermost]


def _without(spec: PartitionSpec, axes: set[str]) -> PartitionSpec:
    dims = ([axis for axis in dim if axis not in axes] for dim in spec.dims)
    return PartitionSpec(*dims, partial={axis: reduction for axis, reduction in spec.partial if axis not in axes})


def traced_value(site: Site, result: int) -> torch.Tensor:
    """The value of a result as the trace has it."""
    assert site.node is not None, "what leaves the program has no results"
    return [value for value in tensor_values(site.node) if value is not None][result]
