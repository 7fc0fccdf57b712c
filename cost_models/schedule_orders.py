"""Pipeline schedules: the order in which each pipeline rank runs the actions of its stages.

The schedules are those of `torch.distributed.pipelining`, under its names; a property test compares the orders. There
are p ranks, v stages on each and m micro-batches. Actions are forward (F) and backward (B). A backward may be split in
two: I for the stage's input, W for its weights. The previous stage waits for I; no stage waits for W.

* GPipe (Huang et al. 2019) runs all F, then all B.
* 1F1B (Narayanan et al. 2019, PipeDream-Flush) runs p - 1 - rank times F, then F and B in turn.
* Interleaved1F1B (Narayanan et al. 2021, section 2.2) is 1F1B with v > 1 stages a rank, in rounds of about p
  micro-batches.
* LoopedBFS (Lamy-Poirier 2022) runs all micro-batches of a stage before the next stage.
* InterleavedZeroBubble (Qi et al. 2023, ZB-H1) is Interleaved1F1B with I as early as possible, and W in the bubble.
* ZBVZeroBubble (Qi et al. 2023, section 6) has two stages a rank, in a V: on ranks 0 to p - 1, then back.
* DualPipeV (DeepSeek-AI 2024, and Qi et al.'s cut-in-half form) has the same V. In its middle, F and B run as one.

In a looped schedule, stage s is on rank s mod p. To add a schedule, write a function from a shape and a rank to rows,
and add a `Schedule` to `SCHEDULES`. All other code reads the properties of schedules there.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from enum import IntEnum
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cost_models.errors import CostArgumentError


class ActionKind(IntEnum):
    """Kind of action of a pipeline rank for one stage and one micro-batch."""

    FORWARD = 0
    BACKWARD = 1
    BACKWARD_INPUT = 2
    BACKWARD_WEIGHT = 3

    @property
    def letter(self) -> str:
        """The letter of this kind of action: F, B, I or W."""
        return "FBIW"[self]


F, B, I, W = ActionKind  # noqa: E741  the letters of the literature


class Action(NamedTuple):
    """One action of one stage on one micro-batch; `1F0` is stage 1, forward, micro-batch 0."""

    stage: int
    kind: ActionKind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.letter}{self.micro_batch}"


Slot = tuple[Action, ...]
"""Actions that a rank runs at once: one action, or a forward and a backward that DualPipeV fuses."""

Rows = NDArray[np.int64]
"""Actions of a rank in order, [n, 4]: stage, kind, micro-batch, and 1 if fused with the previous action."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """A pipeline of p ranks, v stages on each rank, and m micro-batches."""

    ranks: int
    virtual_stages: int
    micro_batches: int

    @property
    def stages(self) -> int:
        return self.ranks * self.virtual_stages

    @property
    def rounds(self) -> int:
        """The number of groups of micro-batches that an interleaved schedule runs one after the other."""
        return max(1, self.micro_batches // self.ranks)

    @property
    def round_size(self) -> int:
        return self.micro_batches // self.rounds


@lru_cache(maxsize=16)
def rank_orders(schedule: str, ranks: int, micro_batches: int, virtual_stages: int = 1) -> tuple[tuple[Slot, ...], ...]:
    """Return the actions of each pipeline rank, in order, under a schedule of `SCHEDULES`.

    Raises:
        CostArgumentError: the schedule is unknown, or does not allow these numbers. The message says what it allows.

    Example:
        >>> [" ".join(str(slot[0]) for slot in order) for order in rank_orders("1F1B", 2, 3)]
        ['0F0 0F1 0B0 0F2 0B1 0B2', '1F0 1B0 1F1 1B1 1F2 1B2']
    """
    return tuple(tuple(_slots(rows)) for rows in order_rows(schedule, ranks, micro_batches, virtual_stages))


def order_rows(schedule: str, ranks: int, micro_batches: int, virtual_stages: int = 1) -> list[Rows]:
    """Return the actions of each pipeline rank as an array `Rows`, [n, 4]: stage, kind, micro-batch, is fused.

    Raises `CostArgumentError` if the schedule is unknown, or does not allow these numbers.
    """
    _check(schedule, ranks, micro_batches, virtual_stages)
    shape = _Shape(ranks, virtual_stages, micro_batches)
    return [SCHEDULES[schedule].rows(shape, rank) for rank in range(ranks)]


def _slots(rows: Rows) -> Iterator[Slot]:
    actions = [Action(stage, ActionKind(kind), index) for stage, kind, index, _ in rows.tolist()]
    starts = np.flatnonzero(rows[:, 3] == 0).tolist()
    return (tuple(actions[start:end]) for start, end in pairwise([*starts, len(actions)]))


def repeating_micro_batches(schedule: str, ranks: int, micro_batches: int) -> int | None:
    """Return the number of micro-batches after which a schedule's steady state repeats; None without a steady state."""
    found = SCHEDULES[schedule]
    if found.in_rounds:
        return _Shape(ranks, 1, micro_batches).round_size
    return 1 if found.repeats else None


def settled_micro_batches(schedule: str, ranks: int, micro_batches: int, virtual_stages: int) -> int:
    """Return the number of micro-batches, found by experiment, after which a steady state has occurred twice."""
    found = SCHEDULES[schedule]
    if found.in_rounds:
        return (3 if virtual_stages > 2 else 4) * _Shape(ranks, virtual_stages, micro_batches).round_size
    return (2 * ranks if found.is_v else ranks) + 4


def stage_ranks(schedule: str, ranks: int, virtual_stages: int = 1) -> tuple[int, ...]:
    """Return the pipeline rank of each stage, in the order of the model."""
    if SCHEDULES[schedule].is_v:
        return (*range(ranks), *reversed(range(ranks)))
    return tuple(range(ranks)) * virtual_stages


def most_in_flight(schedule: str, ranks: int, micro_batches: int, virtual_stages: int = 1) -> tuple[int, ...]:
    """Return, for each rank, the most micro-batches that are between their forward and their backward at once.

    A micro-batch counts once for each stage of the rank. The numbers are counted in the schedule's rows. If the steady
    state repeats, a shorter step is counted: two rounds, and at least twice as many micro-batches as ranks.

    Example:
        >>> most_in_flight("1F1B", 4, 8), most_in_flight("ZBVZeroBubble", 4, 8, 2)
        ((4, 3, 2, 1), (8, 8, 8, 8))
    """
    step = repeating_micro_batches(schedule, ranks, micro_batches)
    if step is not None:
        more = micro_batches - 2 * max(step, ranks)
        micro_batches -= max(0, more) // step * step
    return _counted_in_flight(schedule, ranks, micro_batches, virtual_stages)


@lru_cache(maxsize=8192)
def _counted_in_flight(schedule: str, ranks: int, micro_batches: int, virtual_stages: int) -> tuple[int, ...]:
    kinds = [rows[:, 1] for rows in order_rows(schedule, ranks, micro_batches, virtual_stages)]
    return tuple(int(np.cumsum(_CHANGE_IN_FLIGHT[kind]).max()) for kind in kinds)


_CHANGE_IN_FLIGHT = np.array([1, -1, 0, -1])
"""By how much an action of each kind changes the number of micro-batches in flight."""


@lru_cache(maxsize=64)
def cuts_backward(schedule: str) -> bool:
    """Whether a schedule cuts backwards into halves for inputs and for weights.

    Example:
        >>> [name for name in SCHEDULES if cuts_backward(name)]
        ['InterleavedZeroBubble', 'ZBVZeroBubble', 'DualPipeV']
    """
    shape = _Shape(2, SCHEDULES[schedule].least_stages, 4)
    return any(bool((SCHEDULES[schedule].rows(shape, rank)[:, 1] == I).any()) for rank in range(2))


def usual_schedule(virtual_stages: int) -> str:
    """Return the default schedule's name for a pipeline with this number of stages on each rank."""
    return "1F1B" if virtual_stages == 1 else "Interleaved1F1B"


def _rows(stage: int | Rows, kind: ActionKind, micro_batches: Rows) -> Rows:
    return np.stack(np.broadcast_arrays(stage, kind, micro_batches, 0), axis=1)


def _gpipe(shape: _Shape, rank: int) -> Rows:
    micro_batches = np.arange(shape.micro_batches)
    return np.concatenate([_rows(rank, kind, micro_batches) for kind in (F, B)])


def _one_forward_one_backward(shape: _Shape, rank: int) -> Rows:
    forwards, backwards = (_rows(rank, kind, np.arange(shape.micro_batches)) for kind in (F, B))
    return _alternate(forwards, backwards, min(shape.ranks - 1 - rank, shape.micro_batches))


def _looped_breadth_first(shape: _Shape, rank: int) -> Rows:
    stages, micro_batches = range(rank, shape.stages, shape.ranks), np.arange(shape.micro_batches)
    forwards = [_rows(stage, F, micro_batches) for stage in stages]
    return np.concatenate([*forwards, *(_rows(stage, B, micro_batches[::-1]) for stage in reversed(stages))])


def _interleaved(shape: _Shape, rank: int) -> Rows:
    return _alternate(
        _rounds(shape, rank, F), _rounds(shape, rank, B), int(_warm_up(shape, shape.virtual_stages, rank, 2))
    )


def _interleaved_zero_bubble(shape: _Shape, rank: int) -> Rows:
    """Return a rank's rows, in which each W comes `rank` actions I after its own I.

    The remaining W come last.
    """
    rows = _alternate(
        _rounds(shape, rank, F), _rounds(shape, rank, I), int(_warm_up(shape, shape.virtual_stages, rank, 1))
    )
    weights = _rounds(shape, rank, W)
    (inputs,) = np.nonzero(rows[:, 1] == I)
    last = np.full(min(rank, len(weights)), len(rows))
    return np.insert(rows, np.concatenate([inputs[rank:] + 1, last]), weights, axis=0)


def _warm_up(shape: _Shape, virtual_stages: int | Rows, rank: int | Rows, per_hop: int) -> Rows:
    """Return the number of forwards on a rank before its first backward, in an interleaved schedule.

    Each rank has `per_hop` more forwards than the next rank. `virtual_stages` and `rank` are numbers or arrays.
    """
    last_rank = (virtual_stages - 1) * shape.round_size
    return np.minimum(last_rank + per_hop * (shape.ranks - 1 - rank), virtual_stages * shape.micro_batches)


def _rounds(shape: _Shape, rank: int, kind: ActionKind) -> Rows:
    """Return a rank's actions of one kind, round by round and stage by stage.

    Forwards begin with the rank's first stage, backwards with its last.
    """
    stages = np.arange(rank, shape.stages, shape.ranks)[:: 1 if kind is F else -1]
    starts = np.arange(0, shape.micro_batches, shape.round_size)
    start, stage, index = np.meshgrid(starts, stages, np.arange(shape.round_size), indexing="ij")
    return _rows(stage.ravel(), kind, (start + index).ravel())


def _alternate(forwards: Rows, backwards: Rows, warm_up: int) -> Rows:
    """Return `warm_up` forwards, then forwards and backwards in turn, then the remaining backwards."""
    later = len(forwards) - warm_up
    pairs = np.stack([forwards[warm_up:], backwards[:later]], axis=1)
    return np.concatenate([forwards[:warm_up], pairs.reshape(-1, pairs.shape[-1]), backwards[later:]])


@dataclass(slots=True)
class _Counting:
    """A rank's rows under construction. Each stage takes its micro-batches in order.

    Args:
        rows: (stage, kind, micro-batch, fused with the previous action) of each action so far.
        forwards, backwards, weights: stage to its number of F, of B and I, and of W so far.
        put_off: (stage, micro-batch) of each I whose W `run_put_off` has not appended, the oldest first.
    """

    rows: list[tuple[int, ActionKind, int, bool]] = field(default_factory=list)
    forwards: Counter[int] = field(default_factory=Counter)
    backwards: Counter[int] = field(default_factory=Counter)
    weights: Counter[int] = field(default_factory=Counter)
    put_off: deque[tuple[int, int]] = field(default_factory=deque)

    def run(self, stage: int, *kinds: ActionKind) -> None:
        for kind in kinds:
            self._next(stage, kind)

    def overlap(self, forward_stage: int, backward_stage: int) -> None:
        """Append a forward and a full backward that run as one."""
        self._next(forward_stage, F)
        self._next(backward_stage, B, joined=True)

    def run_put_off(self) -> None:
        """Append the W that was put off first, if any is left."""
        if self.put_off:
            stage, index = self.put_off.popleft()
            self.rows.append((stage, W, index, False))

    def _next(self, stage: int, kind: ActionKind, joined: bool = False) -> None:
        """Append an action on the next micro-batch of a stage. B and I of a stage share one count of micro-batches."""
        counts = self.forwards if kind is F else self.weights if kind is W else self.backwards
        index = counts[stage]
        counts[stage] = index + 1
        if kind is I:
            self.put_off.append((stage, index))
        self.rows.append((stage, kind, index, joined))


def _zero_bubble_v(shape: _Shape, rank: int) -> Rows:
    """Return a rank's rows in the paper's order, which needs at least 2p - 1 micro-batches.

    A shorter step takes the order of 2p - 1 micro-batches, without the actions of micro-batches that it does not have.
    """
    p, first, last = shape.ranks, rank, shape.stages - 1 - rank
    total = max(2 * p - 1, shape.micro_batches)
    made = _Counting()
    made.run(first, *[F] * (2 * (p - rank) - 1))
    for _ in range(rank):
        made.run(last, F)
        made.run(first, F)
    for _ in range(p - rank):
        made.run(last, F, I, W)
    while made.forwards[last] < made.forwards[first] or made.forwards[first] < total:
        if made.forwards[first] < total:
            made.run(first, F)
        made.run(first, I, W)
        made.run(last, F, I, W)
    for _ in range(rank):
        made.run(first, I)
        made.run(last, I)
    made.run(first, *[I, W] * (p - rank))
    for stage in (last, first):
        made.run(stage, *[W] * (total - made.weights[stage]))
    rows = np.array(made.rows)
    return rows[rows[:, 2] < shape.micro_batches]


def _dual_pipe_v(shape: _Shape, rank: int) -> Rows:
    """Return a rank's rows in the eight phases of DualPipe's order."""
    p, first, last = shape.ranks, rank, shape.stages - 1 - rank
    after = p - rank - 1
    made = _Counting()
    made.run(first, *[F] * (2 * after))
    for _ in range(rank + 1):
        made.run(first, F)
        made.run(last, F)
    for _ in range(after):
        made.run(last, I)
        made.run_put_off()
        made.run(last, F)
    for turn in range(shape.micro_batches - 2 * p + rank + 1):
        if turn == 0 and after == 0:  # apart, for the gradient of the last stage's first micro-batch to leave early
            made.run(first, F)
            made.run(last, B)
        else:
            made.overlap(first, last)
        made.overlap(last, first)
    for _ in range(after):
        made.run(last, B)
        made.overlap(last, first)
    _wind_down(made, rank, first, last, after)
    return np.array(made.rows)


def _wind_down(made: _Counting, rank: int, first: int, last: int, after: int) -> None:
    """Append the last backwards of a rank: whole backwards first, then I, and at the end the W that were put off.

    `after` is the number of ranks behind this rank.
    """
    for turn in range(2 * (rank + 1)):
        made.run(last if turn % 2 == 0 else first, B if turn <= rank else I)
    for _ in range(after):
        made.run_put_off()
        made.run(first, I)
    while made.put_off:
        made.run_put_off()


@dataclass(frozen=True, slots=True)
class Schedule:
    """A pipeline schedule.

    Args:
        name: name for `torch.distributed.pipelining.schedules.get_schedule_class`.
        rows: function that returns the actions of a rank, in order.
        least_stages, most_stages: allowed numbers of stages on each rank; `most_stages` is None without a limit.
        is_v: whether stages are laid out as a V; otherwise in loops over the ranks.
        in_rounds: whether micro-batches come in equal rounds of about as many as there are ranks.
        repeats: whether the schedule has a steady state that repeats.
        fills: whether the schedule needs at least as many micro-batches as stages.
        is_searched: whether the search for recipes tries the schedule.
    """

    name: str
    rows: Callable[[_Shape, int], Rows]
    _: KW_ONLY
    least_stages: int = 1
    most_stages: int | None = None
    is_v: bool = False
    in_rounds: bool = False
    repeats: bool = True
    fills: bool = False
    is_searched: bool = True

    def numbers_of_stages(self, most: int) -> range:
        """Return the numbers of stages on each rank that the schedule allows, up to `most`."""
        return range(self.least_stages, min(most, self.most_stages or most) + 1)

    def refusal_of_stages(self, virtual_stages: int) -> str | None:
        """Return a text with the number of stages on each rank that the schedule needs; None if it allows the number.

        Example:
            >>> SCHEDULES["1F1B"].refusal_of_stages(2)
            'needs virtual_stages=1; it has 2'
        """
        least, most = self.least_stages, self.most_stages
        if virtual_stages >= least and (most is None or virtual_stages <= most):
            return None
        needed = f"={least}" if most == least else f" of at least {least}"
        return f"needs virtual_stages{needed}; it has {virtual_stages}"


SCHEDULES: Mapping[str, Schedule] = {
    item.name: item
    for item in (
        Schedule("GPipe", _gpipe, most_stages=1, repeats=False),
        Schedule("1F1B", _one_forward_one_backward, most_stages=1),
        Schedule("Interleaved1F1B", _interleaved, least_stages=2, in_rounds=True),
        # It needs as much memory as GPipe and sends as often as Interleaved1F1B, so the search leaves it out.
        Schedule("LoopedBFS", _looped_breadth_first, repeats=False, is_searched=False),
        Schedule("InterleavedZeroBubble", _interleaved_zero_bubble, in_rounds=True),
        Schedule("ZBVZeroBubble", _zero_bubble_v, least_stages=2, most_stages=2, is_v=True),
        Schedule("DualPipeV", _dual_pipe_v, least_stages=2, most_stages=2, is_v=True, fills=True),
    )
}
"""Name of a schedule to the schedule."""


def admits(schedule: str, ranks: int, micro_batches: int, virtual_stages: int = 1) -> bool:
    """Whether `rank_orders` accepts a schedule with these numbers of ranks, micro-batches and stages on each rank.

    Example:
        >>> admits("1F1B", 4, 6), admits("1F1B", 4, 6, 2), admits("Interleaved1F1B", 4, 9, 2)
        (True, False, False)
    """
    return _refusal(schedule, ranks, micro_batches, virtual_stages) is None


def _check(schedule: str, ranks: int, micro_batches: int, virtual_stages: int) -> None:
    refusal = _refusal(schedule, ranks, micro_batches, virtual_stages)
    if refusal is not None:
        raise CostArgumentError(refusal)


def _refusal(schedule: str, ranks: int, micro_batches: int, virtual_stages: int) -> str | None:
    """Return a text on why a schedule does not allow these numbers, or None if it allows them."""
    if schedule not in SCHEDULES:
        return f"Unknown pipeline schedule {schedule!r}. Known: {', '.join(SCHEDULES)}."
    if min(ranks, micro_batches, virtual_stages) < 1:
        return f"{schedule} with {ranks=}, {micro_batches=}, {virtual_stages=}: each is at least 1."
    found, shape = SCHEDULES[schedule], _Shape(ranks, virtual_stages, micro_batches)
    if (refusal := found.refusal_of_stages(virtual_stages)) is not None:
        return f"{schedule} {refusal}."
    if found.in_rounds and micro_batches % shape.rounds:
        return (
            f"{schedule} on ranks={ranks} takes micro-batches in {shape.rounds} equal rounds (one for each "
            f"full {ranks}); micro_batches={micro_batches} is no multiple of that."
        )
    if found.fills and micro_batches < shape.stages:
        return f"{schedule} needs at least as many micro-batches as stages ({shape.stages}); {micro_batches=}."
    return None
