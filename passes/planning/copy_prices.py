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
from autoshard.ir.spec import PartitionSpec, Reduction
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
    sources: tuple[PartitionSpec, ...],
    targets: tuple[PartitionSpec, ...],
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
    key = (saved_table, value, sources, targets, taken)
    if key in prices.derived:
        return prices.derived[key]
    columns = _places(targets)
    reductions = tuple(sorted({reduction for target in columns for _, reduction in target.partial}))
    saved = np.zeros((2, *times.shape))
    for source, rows in _places(sources).items():
        for step in _steps_from(value, source, reductions, prices):
            for column in columns.get(step.target, ()):
                if math.isclose(step.time_s, times[rows[0], column], rel_tol=1e-9):
                    saved[:, rows, column] = np.array(step.saved(taken))[:, None]
    prices.derived[key] = (saved[0], saved[1])
    return prices.derived[key]


def _places(specs: Sequence[PartitionSpec]) -> dict[PartitionSpec, list[int]]:
    found: dict[PartitionSpec, list[int]] = {}
    for place, spec in enumerate(specs):
        found.setdefault(spec, []).append(place)
    return found


@dataclass(frozen=True, slots=True)
class _CopiedReshard:
    """A reshard of one step: where it leads, its seconds, those of each copy, and what is written if a copy goes.

    Args:
        target: the spec behind it.
        time_s: of the step.
        sent_s, received_s: of the copy of what is sent, and of what was received; 0 where there is none.
        is_either: whether both are the same copy, which goes with the kernel behind if it may.
        pieces_s, joined_s: to write what is sent, and what was received.
    """

    target: PartitionSpec
    time_s: float
    sent_s: float
    received_s: float
    is_either: bool
    pieces_s: float
    joined_s: float

    def saved(self, taken: Taken) -> tuple[float, float]:
        """Seconds that go with the kernel before, and behind."""
        before = self.sent_s - (self.pieces_s if taken.is_read_beside else 0.0)
        behind = self.received_s - (self.joined_s if taken.is_read_often else 0.0)
        goes_behind = taken.behind and self.received_s > 0
        goes_before = taken.before and self.sent_s > 0 and not (self.is_either and goes_behind)
        return before * goes_before, behind * goes_behind


def _steps_from(
    value: ValueInfo, source: PartitionSpec, reductions: tuple[Reduction, ...], prices: Prices
) -> tuple[_CopiedReshard, ...]:
    """The steps that lead away from a spec and copy something, found once for each value and spec."""
    key = (_steps_from, value, source, reductions)
    if key not in prices.derived:
        moves = moves_from(state_of(source, len(value.shape)), prices.mesh, reductions)
        found = (_step(value, source, move, state, prices) for move, state in moves)
        prices.derived[key] = tuple(step for step in found if step.sent_s or step.received_s)
    return prices.derived[key]


def _step(value: ValueInfo, source: PartitionSpec, move: Move, state: State, prices: Prices) -> _CopiedReshard:
    mesh, device = prices.mesh, prices.cluster.device
    target = PartitionSpec(*state[0], partial=dict(state[1]))
    sizes = (local_bytes(value, spec, mesh) for spec in (source, target))
    size = mesh.axis_size(move.axis)
    step = ReshardStep(move.kind, move.axis, size, move.dim, move.to_dim, move.reduction, source, target, *sizes)
    sent_s, copied_s = prices.step_price.parts(step)
    pieces_s, joined_s = memory_time(step.bytes_before, device), memory_time(step.bytes_after, device)
    if move.kind is ReshardKind.MAKE_PARTIAL:  # a choice between the value and zeros, and a launch that makes its flag
        chosen_s = device.launch_latency_s + pieces_s + joined_s
        saved_s = copied_s * chosen_s / (chosen_s + device.launch_latency_s)
        return _CopiedReshard(target, sent_s + copied_s, saved_s, saved_s, True, pieces_s, joined_s)
    splits, joins = copied_by(step, value.shape, mesh)
    each = copied_s / max(1, splits + joins)
    return _CopiedReshard(target, sent_s + copied_s, splits * each, joins * each, False, pieces_s, joined_s)


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
