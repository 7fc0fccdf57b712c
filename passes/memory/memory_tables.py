"""Compute tables of the bytes that values, copies by reshards, and workspaces of calls take on each rank.

A site is a call, an input or a result of the program. Its options are its strategies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autoshard.ir.mesh import Mesh
from autoshard.ir.spec import PartitionSpec
from autoshard.kernels.offload import to_host
from autoshard.rules.enumeration import Strategy
from passes.memory.liveness import Held, OnLink
from passes.solver.assignment import Floats
from passes.strategies.enumerate_strategies import Link, SearchSpace, Site, needs_of, specs_of
from passes.strategies.price import local_bytes_of
from passes.strategies.tensor_infos import operand_infos
from passes.strategies.workspaces import has_workspace, workspace_of


@dataclass(frozen=True, slots=True)
class MemoryTables:
    """Cached tables of bytes on each rank; sites and links that are alike share one table object."""

    space: SearchSpace
    _tables: dict[Any, Floats] = field(default_factory=dict, repr=False)

    def of_value(self, name: str, result: int, copies: float = 1.0) -> Floats:
        """Return the bytes on each rank of result number `result` of site `name`, times `copies`, [options]."""
        site = self.space.sites[name]
        if is_on_host(site):
            return self._nothing(len(site.strategies))
        key = (site.results[result], id(site.strategies), result, copies)
        if key not in self._tables:
            sizes = local_bytes_of(site.results[result], specs_of(site, result), self.space.mesh)
            self._tables[key] = sizes * copies
        return self._tables[key]

    def of_call(self, name: str) -> Floats | None:
        """Return the bytes on each rank of the workspace of call `name`, [its options], or None without a workspace."""
        site = self.space.sites[name]
        if site.node is None or not has_workspace(site.node):
            return None
        key = (site.call, id(site.strategies))
        if key not in self._tables:
            self._tables[key] = np.array([_workspace_bytes(site, item, self.space.mesh) for item in site.strategies])
        return self._tables[key]

    def on_link(self, kept: OnLink) -> Floats:
        """Return the bytes on each rank that a link uses, for each pair of options, [tail's options, head's options].

        If `kept.held` is `EITHER`, the result may depend on the head's options alone, [head's options].
        """
        link = self.space.links[kept.link]
        tail, head = self.space.sites[link.tail], self.space.sites[link.head]
        if is_on_host(tail):
            return self._nothing(len(tail.strategies), len(head.strategies))
        value = tail.results[link.result]
        key = (value, id(tail.strategies), link.result, id(head.strategies), link.operand, kept.held)
        if key not in self._tables:
            self._tables[key] = self._link_table(link, kept.held)
        return self._tables[key]

    def _nothing(self, *options: int) -> Floats:
        key = ("nothing", *options)
        if key not in self._tables:
            self._tables[key] = np.zeros(options)
        return self._tables[key]

    def _link_table(self, link: Link, held: Held) -> Floats:
        tail, head = self.space.sites[link.tail], self.space.sites[link.head]
        value, mesh = tail.results[link.result], self.space.mesh
        sources, targets = specs_of(tail, link.result), needs_of(head, link)
        after = local_bytes_of(value, targets, mesh)
        if is_on_host(head):
            return np.broadcast_to(after, (len(sources), len(targets))) * (held is Held.VALUE)
        if held is Held.EITHER:
            return after
        if held is Held.PACKED:
            return np.where(_is_packed(sources, targets, mesh), after, 0.0)
        is_there = differs(sources, targets, mesh) == (held is Held.COPY)
        return np.where(is_there, after, 0.0)


def is_on_host(site: Site) -> bool:
    """Whether a site is a copy to the host, so that its result takes no device memory."""
    return site.node is not None and site.node.target is to_host


def _workspace_bytes(site: Site, strategy: Strategy, mesh: Mesh) -> float:
    assert site.node is not None, "calls have nodes"
    pairs = zip(operand_infos(site.node), strategy.inputs, strict=True)
    return workspace_of(site.node, [info._replace(shape=spec.local_shape(info.shape, mesh)) for info, spec in pairs])


def _is_packed(sources: Sequence[PartitionSpec], targets: Sequence[PartitionSpec], mesh: Mesh) -> np.ndarray:
    """Return a boolean array [sources, targets]: True if the reshard copies its pieces into order.

    A gather of a dim other than the first needs this copy, and so does the move of a mesh axis to another dim.
    """
    found = np.zeros((len(sources), len(targets)), dtype=bool)
    for axis, size in mesh.axes:
        if size > 1:
            before, after = (np.array([_dim_of(spec, axis) for spec in specs]) for specs in (sources, targets))
            is_moved = (before[:, None] >= 0) & (before[:, None] != after)
            found |= is_moved & ((before[:, None] > 0) | (after >= 0))
    return found


def _dim_of(spec: PartitionSpec, axis: str) -> int:
    dim = spec.dim_of(axis)
    return -1 if dim is None else dim


def differs(sources: Sequence[PartitionSpec], targets: Sequence[PartitionSpec], mesh: Mesh) -> np.ndarray:
    """Return a boolean array [sources, targets]: True if source and target differ on mesh axes larger than one."""
    numbers: dict[PartitionSpec, int] = {}
    alone = {axis for axis, size in mesh.axes if size == 1}
    number = {
        spec: numbers.setdefault(_without(spec, alone) if alone else spec, len(numbers))
        for spec in dict.fromkeys((*sources, *targets))
    }
    before = np.array([number[spec] for spec in sources])
    after = np.array([number[spec] for spec in targets])
    return before[:, None] != after[None, :]


def _without(spec: PartitionSpec, axes: set[str]) -> PartitionSpec:
    dims = ([axis for axis in dim if axis not in axes] for dim in spec.dims)
    return PartitionSpec(*dims, partial={axis: reduction for axis, reduction in spec.partial if axis not in axes})
