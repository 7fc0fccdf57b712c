"""The graph of partition specs. Nodes are specs; edges are moves, each of which changes a single mesh axis.

Several axes on one dim form a stack, major to minor. Only the minor-most axis can leave, and an arriving axis becomes
the minor-most, since ranks hold contiguous pieces only then. So an axis may

* leave a dim (all-gather), or move to another dim (all-to-all), if it is the minor-most of its dim;
* if it holds copies, split a dim (slice), or become partial (one rank keeps the value);
* if it is partial, be reduced (all-reduce), or be reduced and split a dim (reduce-scatter).

All partial axes of a spec have one reduction, because two reductions do not commute. A partial value changes its
reduction only by being reduced.

The graph depends only on the mesh, the number of dims and the reductions; edge weights depend on the shape. Shortest
distances come from the Bellman-Ford iteration (Bellman 1958), for all targets at once and vectorised over edges. The
number of rounds is the number of edges of the longest of the shortest paths, about twice the number of axes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autoshard.ir.mesh import Mesh
from autoshard.ir.spec import PartitionSpec, Reduction


class ReshardKind(StrEnum):
    """Kind of a reshard's step, which changes one mesh axis."""

    ALL_GATHER = "all_gather"
    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "all_to_all"
    MAKE_PARTIAL = "make_partial"
    REDUCE_SCATTER = "reduce_scatter"
    SLICE = "slice"


@dataclass(frozen=True, slots=True)
class Move:
    """A change of one axis, which splits `dim` before and `to_dim` after (None: no dim).

    `reduction` belongs to the partial value before (ALL_REDUCE, REDUCE_SCATTER) or after (MAKE_PARTIAL).
    """

    kind: ReshardKind
    axis: str
    dim: int | None = None
    to_dim: int | None = None
    reduction: Reduction | None = None

    def __str__(self) -> str:
        parts = [self.axis]
        parts += [] if self.dim is None else [f"dim={self.dim}"]
        parts += [] if self.to_dim is None else [f"to_dim={self.to_dim}"]
        parts += [] if self.reduction is None else [f"reduction={self.reduction.value}"]
        return f"{self.kind.value}({', '.join(parts)})"


@lru_cache(maxsize=2**14)
def _move(
    kind: ReshardKind, axis: str, dim: int | None, to_dim: int | None, reduction: Reduction | None = None
) -> Move:
    """Return a move; equal arguments give the same object.

    Graphs of many axes have hundreds of thousands of edges, but few different moves.
    """
    return Move(kind, axis, dim, to_dim, reduction)


Partials = tuple[tuple[str, Reduction], ...]

Stacks = tuple[tuple[str, ...], ...]
"""For each dim of the tensor, its stack of axes."""

State = tuple[Stacks, Partials]
"""A spec as tuples, cheap to build and to hash: the stack of axes of every dim, and the partial axes sorted by name."""


def state_of(spec: PartitionSpec, ndim: int) -> State:
    """Return `spec` as hashable tuples: the axes that split each of the `ndim` dims, and the partial axes."""
    return tuple(spec.axes_of(dim) for dim in range(ndim)), spec.partial


def moves_from(state: State, mesh: Mesh, reductions: Sequence[Reduction]) -> Iterator[tuple[Move, State]]:
    """Yield each move from `state` (a spec as tuples), with the state after the move.

    An axis that becomes partial has one of `reductions`.
    """
    stacks, partial = state
    used = {axis for axes in stacks for axis in axes}
    yield from _moves_of_splits(stacks, partial)
    reduction_of = dict(partial)
    for axis in mesh.axis_names:
        if axis in reduction_of:
            yield from _moves_of_partial(stacks, partial, axis, reduction_of[axis])
        elif axis not in used:
            yield from _moves_of_copies(stacks, partial, axis, reductions)


def _moves_of_splits(stacks: Stacks, partial: Partials) -> Iterator[tuple[Move, State]]:
    for dim, axes in enumerate(stacks):
        if not axes:
            continue
        axis = axes[-1]
        without = (*stacks[:dim], axes[:-1], *stacks[dim + 1 :])
        yield _move(ReshardKind.ALL_GATHER, axis, dim, None), (without, partial)
        for to_dim in range(len(stacks)):
            if to_dim != dim:
                yield _move(ReshardKind.ALL_TO_ALL, axis, dim, to_dim), (_push(without, to_dim, axis), partial)


def _moves_of_partial(
    stacks: Stacks, partial: Partials, axis: str, reduction: Reduction
) -> Iterator[tuple[Move, State]]:
    rest = tuple(item for item in partial if item[0] != axis)
    yield _move(ReshardKind.ALL_REDUCE, axis, None, None, reduction), (stacks, rest)
    for to_dim in range(len(stacks)):
        yield _move(ReshardKind.REDUCE_SCATTER, axis, None, to_dim, reduction), (_push(stacks, to_dim, axis), rest)


def _moves_of_copies(
    stacks: Stacks, partial: Partials, axis: str, reductions: Sequence[Reduction]
) -> Iterator[tuple[Move, State]]:
    for to_dim in range(len(stacks)):
        yield _move(ReshardKind.SLICE, axis, None, to_dim), (_push(stacks, to_dim, axis), partial)
    pending = {reduction for _, reduction in partial}
    for reduction in reductions:
        if pending - {reduction}:
            continue
        after = tuple(sorted((*partial, (axis, reduction))))
        yield _move(ReshardKind.MAKE_PARTIAL, axis, None, None, reduction), (stacks, after)


def _push(stacks: Stacks, dim: int, axis: str) -> Stacks:
    return (*stacks[:dim], (*stacks[dim], axis), *stacks[dim + 1 :])


@dataclass(frozen=True, slots=True, eq=False)
class SpecGraph:
    """All specs of tensors with `ndim` dims on `mesh`, and the moves between them.

    Args:
        specs: the spec of each node, [nodes].
        moves: the move of each edge, [edges], sorted by source node.
        sources, targets: source and target node of each edge, [edges].
        starts: index of each node's first edge, [nodes].
        classes: class number of each edge, [edges]. Edges of one class have equal kind, axis and reduction.
        stack_ids: index in `stacks` of each dim's stack, [nodes, ndim].
        stacks: the distinct stacks of axes on one dim.
        index: index of the node of each spec, by the spec as tuples (`state_of`).
    """

    mesh: Mesh
    ndim: int
    specs: tuple[PartitionSpec, ...]
    moves: tuple[Move, ...]
    sources: NDArray[np.int64]
    targets: NDArray[np.int64]
    starts: NDArray[np.int64]
    classes: NDArray[np.int64]
    stack_ids: NDArray[np.int64]
    stacks: tuple[tuple[str, ...], ...]
    index: dict[State, int] = field(repr=False)

    def node_of(self, spec: PartitionSpec) -> int:
        """Return the index of the node of `spec`."""
        return self.index[state_of(spec, self.ndim)]

    def local_bytes(self, shape: Sequence[int], itemsize: int) -> NDArray[np.int64]:
        """Return the bytes of a rank's padded local tensor under each spec, [nodes], for a tensor of global `shape`."""
        result = np.full(len(self.specs), itemsize, dtype=np.int64)
        for dim, size in enumerate(shape):
            sizes = np.array([_padded_size(size, axes, self.mesh) for axes in self.stacks], dtype=np.int64)
            result *= sizes[self.stack_ids[:, dim]]
        return result

    def edges_from(self, node: int) -> range:
        """Return the indices of the edges that start at `node`."""
        end = self.starts[node + 1] if node + 1 < len(self.starts) else len(self.moves)
        return range(int(self.starts[node]), int(end))

    def distances_to(self, targets: Sequence[int], weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the shortest distance from every node to each target, [nodes, targets], for edge lengths `weights`."""
        result = np.full((len(self.specs), len(targets)), np.inf)
        result[targets, np.arange(len(targets))] = 0.0
        if not self.moves:
            return result
        while True:
            candidates = np.minimum.reduceat(result[self.targets] + weights[:, None], self.starts, axis=0)
            shorter = np.minimum(result, candidates)
            if np.array_equal(shorter, result):
                return result
            result = shorter

    def shortest_path(self, source: int, target: int, weights: NDArray[np.float64]) -> tuple[int, ...]:
        """Return the edge indices of a shortest path between two nodes, for the edge lengths `weights`.

        Among paths of equal length, the path with the fewest edges wins, then the first path by the text of its moves.
        """
        distance = self.distances_to([target], weights)[:, 0]
        tight = weights + distance[self.targets] == distance[self.sources]
        hops = self.distances_to([target], np.where(tight, 1.0, np.inf))[:, 0]
        path: list[int] = []
        while source != target:
            best = [
                edge for edge in self.edges_from(source) if tight[edge] and hops[self.targets[edge]] + 1 == hops[source]
            ]
            path.append(min(best, key=lambda edge: str(self.moves[edge])))
            source = int(self.targets[path[-1]])
        return tuple(path)


@lru_cache(maxsize=128)
def spec_graph(mesh: Mesh, ndim: int, reductions: tuple[Reduction, ...]) -> SpecGraph:
    """Return the graph of all specs with `ndim` dims on `mesh`; partial values have one of `reductions`."""
    index, edges = _explore(mesh, ndim, reductions)
    stack_index: dict[tuple[str, ...], int] = {}
    stack_ids = [[stack_index.setdefault(axes, len(stack_index)) for axes in state[0]] for state in index]
    classes: dict[tuple[ReshardKind, str, Reduction | None], int] = {}
    class_of = {  # by object: hashing a move's fields is slow
        id(move): classes.setdefault((move.kind, move.axis, move.reduction), len(classes))
        for move in {id(move): move for move, _, _ in edges}.values()
    }
    keys = [class_of[id(move)] for move, _, _ in edges]
    sources = np.array([source for _, source, _ in edges], dtype=np.int64)
    return SpecGraph(
        mesh=mesh,
        ndim=ndim,
        specs=tuple(PartitionSpec(*axes, partial=dict(partial)) for axes, partial in index),
        moves=tuple(move for move, _, _ in edges),
        sources=sources,
        targets=np.array([target for _, _, target in edges], dtype=np.int64),
        starts=np.searchsorted(sources, np.arange(len(index))),
        classes=np.array(keys, dtype=np.int64),
        stack_ids=np.array(stack_ids, dtype=np.int64),
        stacks=tuple(stack_index),
        index=index,
    )


def _explore(
    mesh: Mesh, ndim: int, reductions: Sequence[Reduction]
) -> tuple[dict[State, int], list[tuple[Move, int, int]]]:
    """Search breadth first for the states that are reachable from the replicated state.

    Return the index of each state, and the edges as (move, source, target), sorted by source.
    """
    states: list[State] = [(((),) * ndim, ())]
    index = {states[0]: 0}
    edges = []
    for node, state in enumerate(states):  # grows during the loop
        for move, after in moves_from(state, mesh, reductions):
            if after not in index:
                index[after] = len(states)
                states.append(after)
            edges.append((move, node, index[after]))
    return index, edges


def _padded_size(size: int, axes: Sequence[str], mesh: Mesh) -> int:
    for axis in axes:
        size = -(-size // mesh.axis_size(axis))
    return size
