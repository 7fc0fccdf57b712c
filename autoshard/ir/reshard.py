"""Reshards: the cheapest way from one spec to another, in steps. Each step changes one mesh axis.

A reshard is a shortest path in the graph of specs (`autoshard.ir.spec_graph`), with each step priced by a `cost`. Axes
on which the two specs agree take part too. For example, an all-reduce of copies may send fewer bytes if another axis
slices the value first and gathers it afterwards.

The search assumes that `cost` is not negative and depends only on a step's kind, axis, reduction and bytes. Steps of
equal kind, axis, reduction and bytes are priced once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autoshard.errors import InvalidSpecError
from autoshard.ir.mesh import Mesh
from autoshard.ir.spec import PartitionSpec, Reduction
from autoshard.ir.spec_graph import Move, ReshardKind, SpecGraph, spec_graph

__all__ = [
    "ReshardKind",
    "ReshardStep",
    "StepCost",
    "bytes_sent",
    "plan_reshard",
    "reshard_costs",
]

STEP_COST_BYTES = 2.0**-10
"""Addend of `bytes_sent` for every step. Among paths that send equal bytes, the path with fewer steps is then cheapest.
"""


@dataclass(frozen=True, slots=True)
class ReshardStep:
    """A change of spec along one mesh axis, `axis`.

    Args:
        axis_size: number of ranks along the axis.
        dim: the dim that `axis` splits before (ALL_GATHER, ALL_TO_ALL), or None.
        to_dim: the dim that `axis` splits after (SLICE, REDUCE_SCATTER, ALL_TO_ALL), or None.
        reduction: reduction of the partial value before (ALL_REDUCE, REDUCE_SCATTER) or after (MAKE_PARTIAL), or None.
        source, target: the specs before and after.
        bytes_before, bytes_after: bytes of the padded local tensor before and after.
    """

    kind: ReshardKind
    axis: str
    axis_size: int
    dim: int | None
    to_dim: int | None
    reduction: Reduction | None
    source: PartitionSpec
    target: PartitionSpec
    bytes_before: int
    bytes_after: int

    def __str__(self) -> str:
        return str(Move(self.kind, self.axis, self.dim, self.to_dim, self.reduction))


StepCost = Callable[[ReshardStep], float]
"""Function that returns the price of a step: a number of at least 0, in any unit."""


def bytes_sent(step: ReshardStep) -> float:
    """Return the bytes that each rank sends for `step` with ring algorithms, plus `STEP_COST_BYTES`.

    All-gather and reduce-scatter send the local piece to `axis_size - 1` ranks. An all-reduce is a reduce-scatter and
    an all-gather. An all-to-all sends all pieces but one (Thakur, Rabenseifner, Gropp 2005, section 4). Local steps
    send nothing.
    """
    others = step.axis_size - 1
    sent = {
        ReshardKind.ALL_GATHER: others * step.bytes_before,
        ReshardKind.ALL_REDUCE: 2 * others * step.bytes_before / step.axis_size,
        ReshardKind.ALL_TO_ALL: others * step.bytes_before / step.axis_size,
        ReshardKind.MAKE_PARTIAL: 0,
        ReshardKind.REDUCE_SCATTER: others * step.bytes_after,
        ReshardKind.SLICE: 0,
    }
    return sent[step.kind] + STEP_COST_BYTES


def plan_reshard(
    source: PartitionSpec,
    target: PartitionSpec,
    shape: Sequence[int],
    mesh: Mesh,
    *,
    itemsize: int = 4,
    cost: StepCost | None = None,
) -> tuple[ReshardStep, ...]:
    """Return the cheapest steps that bring a tensor of global `shape` from spec `source` to spec `target`.

    Args:
        itemsize: bytes of one element.
        cost: price of a step, not negative, and equal for steps of equal kind, axis, reduction and bytes. Default:
            `bytes_sent`. Results are cached by `cost`, so pass the same or an equal function each time.

    Returns:
        The steps in order; none for equal specs. Among equally cheap paths, the fewest steps win, then the first in the
        order of their texts.

    Raises:
        InvalidSpecError: a spec does not fit the mesh or the shape, or mixes reductions.
        ValueError: `cost` gave a price that is negative or not finite.

    Example:
        >>> from autoshard.ir.spec import P
        >>> steps = plan_reshard(P("data"), P(None, "data"), (8, 8), Mesh({"data": 2}))
        >>> [str(step) for step in steps]
        ['all_to_all(data, dim=0, to_dim=1)']
    """
    return _plan(source, target, tuple(shape), mesh, itemsize, cost or bytes_sent)


def reshard_costs(
    sources: Sequence[PartitionSpec],
    targets: Sequence[PartitionSpec],
    shape: Sequence[int],
    mesh: Mesh,
    itemsize: int = 4,
    cost: StepCost | None = None,
) -> NDArray[np.float64]:
    """Return the price of the cheapest reshard from each of `sources` to each of `targets`, [sources, targets].

    `shape` is the global shape, `itemsize` the bytes of an element, and `cost` the price of a step (default:
    `bytes_sent`). Raises `InvalidSpecError` and `ValueError` under the conditions of `plan_reshard`.
    """
    if not sources or not targets:
        return np.zeros((len(sources), len(targets)))
    for spec in dict.fromkeys((*sources, *targets)):
        _check(spec, mesh, len(shape))
    graph = spec_graph(mesh, len(shape), _reductions(*sources, *targets))
    distances = _distances_to(graph, tuple(shape), itemsize, cost or bytes_sent)
    columns = [graph.node_of(spec) for spec in targets]
    missing = [node for node in dict.fromkeys(columns) if node not in distances]
    if missing:
        found = graph.distances_to(missing, _weights(graph, tuple(shape), itemsize, cost or bytes_sent))
        distances.update(zip(missing, found.T.copy(), strict=True))
    rows = [graph.node_of(spec) for spec in sources]
    return np.stack([distances[node][rows] for node in columns], axis=1)


@lru_cache(maxsize=64)
def _distances_to(graph: SpecGraph, shape: tuple[int, ...], itemsize: int, cost: StepCost) -> dict[int, NDArray]:
    """Return the cache of `reshard_costs`: index of a target node to the prices of reshards from every node, [nodes].

    The cache is empty at first, and `reshard_costs` fills it. Equal arguments give the same cache.
    """
    return {}


@lru_cache(maxsize=2**16)
def _plan(
    source: PartitionSpec,
    target: PartitionSpec,
    shape: tuple[int, ...],
    mesh: Mesh,
    itemsize: int,
    cost: StepCost,
) -> tuple[ReshardStep, ...]:
    _check(source, mesh, len(shape))
    _check(target, mesh, len(shape))
    if source == target:
        return ()
    graph = spec_graph(mesh, len(shape), _reductions(source, target))
    weights = _weights(graph, shape, itemsize, cost)
    path = graph.shortest_path(graph.node_of(source), graph.node_of(target), weights)
    sizes = graph.local_bytes(shape, itemsize)
    return tuple(_step(graph, edge, sizes) for edge in path)


@lru_cache(maxsize=256)
def _weights(graph: SpecGraph, shape: tuple[int, ...], itemsize: int, cost: StepCost) -> NDArray[np.float64]:
    """Return the price of every edge of `graph`, [edges].

    Edges of equal class and equal bytes share one call of `cost`.
    """
    sizes = graph.local_bytes(shape, itemsize)
    values, size_ids = np.unique(sizes, return_inverse=True)
    keys = graph.classes * len(values) + size_ids[graph.sources]
    keys = keys * len(values) + size_ids[graph.targets]
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    prices = [_price(_step(graph, int(edge), sizes), cost) for edge in first]
    return np.array(prices, dtype=np.float64)[inverse]


def _price(step: ReshardStep, cost: StepCost) -> float:
    price = float(cost(step))
    if not math.isfinite(price) or price < 0:
        raise ValueError(f"cost={cost!r} gave price={price!r} for {step}; a price is finite and not negative.")
    return price


def _step(graph: SpecGraph, edge: int, sizes: NDArray[np.int64]) -> ReshardStep:
    move = graph.moves[edge]
    source, target = int(graph.sources[edge]), int(graph.targets[edge])
    return ReshardStep(
        kind=move.kind,
        axis=move.axis,
        axis_size=graph.mesh.axis_size(move.axis),
        dim=move.dim,
        to_dim=move.to_dim,
        reduction=move.reduction,
        source=graph.specs[source],
        target=graph.specs[target],
        bytes_before=int(sizes[source]),
        bytes_after=int(sizes[target]),
    )


def _check(spec: PartitionSpec, mesh: Mesh, ndim: int) -> None:
    spec.check(mesh, ndim)
    if len(_reductions(spec)) > 1:
        raise InvalidSpecError(
            f"{spec!r} awaits reductions of several kinds; they do not commute, so reduce all but one kind first."
        )


def _reductions(*specs: PartitionSpec) -> tuple[Reduction, ...]:
    return tuple(sorted({reduction for spec in specs for _, reduction in spec.partial}))
