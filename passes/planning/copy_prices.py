r"""Price the copies at collectives that go with the kernels on either side of them.

A reshard over another dim than the first copies: into pieces before a reduce-scatter or all-to-all, from pieces behind
an all-gather or all-to-all, and what a rank keeps of a value that is whole. A generated kernel that computes what is
sent writes its pieces in place of it, and one that computes on what was received reads the pieces
(`passes/lowering/choose_groups.py`); such a copy then costs nothing but what is moved beside. On a link of one step
whose call before, or behind, is pointwise and runs as it is,

.. math::  \text{saved} = f \, c - x \, m(v) ,

with the step's copies :math:`c` (`StepPrice`), the part :math:`f` of them that goes, and, where something else reads
the value too, what has to be written all the same: the pieces before (:math:`v`), or what was put together behind.
Copies of reshards of several steps are counted as operators.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.ir.mesh import Mesh
from autoshard.ir.reshard import ReshardKind, ReshardStep
from autoshard.ir.spec import PartitionSpec
from autoshard.ir.spec_graph import Move, State, moves_from, state_of
from cost_models.compute import memory_time
from passes.solver.assignment import Floats
from passes.strategies.enumerate_strategies import ValueInfo
from passes.strategies.price import Prices, local_bytes


@dataclass(frozen=True, slots=True)
class Taken:
    """Which copies of a link's reshard kernels may take.

    Args:
        before: whether the kernel that computes what is sent does.
        behind: whether the one that reads what is received does.
        is_read_beside: whether something else reads the value before it is sent.
        is_read_often: whether several kernels read what is received.
    """

    before: bool
    behind: bool
    is_read_beside: bool
    is_read_often: bool


def saved_table(
    value: ValueInfo,
    sources: Sequence[PartitionSpec],
    targets: Sequence[PartitionSpec],
    times: Floats,
    taken: Taken,
    prices: Prices,
) -> tuple[Floats, Floats]:
    """Seconds of copies that go with the kernel before, and with the one behind, [sources, targets] each.

    Args:
        value: what is resharded.
        sources, targets: its specs before and after.
        times: seconds of each reshard.
        taken: which copies may go.
        prices: the prices.
    """
    before, behind = np.zeros_like(times), np.zeros_like(times)
    columns: dict[State, list[int]] = {}
    for place, target in enumerate(targets):
        columns.setdefault(state_of(target, len(value.shape)), []).append(place)
    known: dict[PartitionSpec, dict[int, tuple[float, float]]] = {}
    for row, source in enumerate(sources):
        if source not in known:
            known[source] = _saved_from(value, source, columns, times[row], taken, prices)
        for column, (first, last) in known[source].items():
            before[row, column], behind[row, column] = first, last
    return before, behind


def _saved_from(
    value: ValueInfo,
    source: PartitionSpec,
    columns: dict[State, list[int]],
    times: Floats,
    taken: Taken,
    prices: Prices,
) -> dict[int, tuple[float, float]]:
    """What goes of the copies on the way from one spec, by the place of the target: of ways of a single step."""
    found: dict[int, tuple[float, float]] = {}
    reductions = sorted({reduction for _, partial in columns for _, reduction in partial})
    for move, state in moves_from(state_of(source, len(value.shape)), prices.mesh, reductions):
        if state not in columns or move.kind is ReshardKind.ALL_REDUCE:
            continue
        step = _step(value, source, move, state, prices.mesh)
        price = prices.step_price(step)
        saved = _saved(value, step, taken, prices)
        for column in columns[state]:
            if math.isclose(price, times[column], rel_tol=1e-9):
                found[column] = saved
    return found


def _step(value: ValueInfo, source: PartitionSpec, move: Move, state: State, mesh: Mesh) -> ReshardStep:
    axes, partial = state
    target = PartitionSpec(*axes, partial=dict(partial))
    sizes = (local_bytes(value, spec, mesh) for spec in (source, target))
    size = mesh.axis_size(move.axis)
    return ReshardStep(move.kind, move.axis, size, move.dim, move.to_dim, move.reduction, source, target, *sizes)


def _saved(value: ValueInfo, step: ReshardStep, taken: Taken, prices: Prices) -> tuple[float, float]:
    """Seconds of a step's copies that go with the kernel before, and behind."""
    if step.kind is ReshardKind.MAKE_PARTIAL:
        return _saved_of_partial(step, taken, prices)
    splits, joins = copied_by(step, value.shape, prices.mesh)
    copied_s = prices.step_price.parts(step)[1]
    each = copied_s / max(1, splits + joins)
    written = memory_time(step.bytes_before, prices.cluster.device) if taken.is_read_beside else 0.0
    put_together = memory_time(step.bytes_after, prices.cluster.device) if taken.is_read_often else 0.0
    before = each - written if splits and taken.before else 0.0
    behind = each - put_together if joins and taken.behind else 0.0
    return before, behind


def _saved_of_partial(step: ReshardStep, taken: Taken, prices: Prices) -> tuple[float, float]:
    """The same where all ranks but one put zeros: that goes with either side, but for a launch that makes a flag."""
    device = prices.cluster.device
    chosen_s = device.launch_latency_s + memory_time(step.bytes_before + step.bytes_after, device)
    saved = prices.step_price.parts(step)[1] * chosen_s / (chosen_s + device.launch_latency_s)
    return (0.0, saved) if taken.behind else (saved * taken.before, 0.0)


def copied_by(step: ReshardStep, shape: Sequence[int], mesh: Mesh) -> tuple[bool, bool]:
    """Whether a step copies what is sent, and what was received, as `autoshard.ir.emit` writes it."""
    if step.kind is ReshardKind.SLICE:
        return False, True
    sends = step.kind in (ReshardKind.REDUCE_SCATTER, ReshardKind.ALL_TO_ALL)
    receives = step.kind in (ReshardKind.ALL_GATHER, ReshardKind.ALL_TO_ALL)
    before, after = (spec.local_shape(shape, mesh) for spec in (step.source, step.target))
    splits = sends and math.prod(before[: step.to_dim]) != 1
    joins = receives and math.prod(after[: step.dim]) != 1
    return splits, joins
