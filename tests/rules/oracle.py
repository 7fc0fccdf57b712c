"""Find the valid placements of one call by trying all placements.

The module is the reference of the completeness of rules, as `run_strategy` is of their soundness. Each operand is cut
by every placement. The unchanged operator runs on each rank's pieces, and local results are joined by every placement.

1. Draw operands: the call's own, similar values, normal values, small integers. Small operands get more draws. A draw
   counts if the operator accepts the draw with finite results.
2. An operand that no result depends on may lie in any way. Placements that differ only there count as one.
3. For every combination of input placements, on every draw with new random addends: run the operator on each rank's
    pieces. A combination that fails once is invalid.
4. The labels of a result are all placements that are true of its pieces on every draw. Several labels of equal pieces
   are one placement; for example, a copy is also a pending maximum.

A placement that is true on all draws is evidence, no proof. The search ignores operators with a local form, whose
arguments contain shapes, and uneven splits. PyTorch's own comparison for DTensor's rules is
`torch.distributed.tensor._ops.strategy_validation` (2026). Draws, relevance and labels are ours.

An operator without a check of its indices may access memory outside of mismatched pieces. Run such operators in a
separate process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import islice, product
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from autoshard.errors import AutoshardError
from autoshard.ir.spec import Reduction
from autoshard.rules.sampling import SampledCall, Sampler, agree, call_of
from tests.rules.run_strategy import addends

Placements = tuple[Placement, ...]
"""One placement for each tensor operand, or each tensor result, of a call."""

Strategy = tuple[Placements, Placements]
"""Placements of operands and results, as listed by `autoshard.rules.strategies`."""

_MOST_COMBINATIONS = 20_000
_SCALES = (None, 1.0, 10.0)
_FEWEST_DRAWS, _MOST_DRAWS = 8, 64
_ELEMENTS = 512
"""Least number of drawn elements of each operand and result, so that small tensors do not pass by chance."""


class NotJudgedError(AutoshardError):
    """A call that the oracle cannot judge; the message says why."""


@dataclass(frozen=True, slots=True)
class ValidPlacement:
    """Placements of operands, and the placements that the pieces of the results then have.

    Args:
        inputs: placements of the operands; several, if they differ only in operands without influence.
        outputs: for each result, every placement that is true of its pieces.
    """

    inputs: tuple[Placements, ...]
    outputs: tuple[frozenset[Placement], ...]

    def is_admitted_by(self, strategies: Iterable[Strategy]) -> bool:
        """Whether one of `strategies` has these inputs, and outputs that are true of the pieces."""
        return any(
            inputs in self.inputs and all(map(_is_true, outputs, self.outputs)) for inputs, outputs in strategies
        )


def _is_true(placement: Placement, labels: frozenset[Placement]) -> bool:
    """Whether a placement is among the labels of the pieces of a result.

    A pending average is a pending sum to a rule whose local form divides by the number of pieces.
    """
    return placement in labels or (labels == {Partial("avg")} and placement == Partial("sum"))


def find_valid_placements(
    op: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    axis_size: int = 2,
    *,
    most: int = _MOST_COMBINATIONS,
    seed: int = 0,
) -> tuple[ValidPlacement, ...]:
    """Return the placements on one mesh axis under which the unchanged operator on pieces gives one device's results.

    The computation of the whole call on every rank is left out.

    Operands may be split along any dim that `axis_size` divides, be whole, or be partial sums.
    Integers and booleans beside floats are indices and masks, which are split or whole. Results may be pending averages
    too.

    Args:
        op: a `torch.ops` overload.
        args, kwargs: its arguments, with real tensors.
        axis_size: the number of ranks.
        most: largest number of combinations to try.
        seed: seed of all random numbers.

    Raises:
        NotJudgedError: the call has no tensors or empty tensors, is random, or gives no finite number.

    Example:
        >>> x, y = torch.randn(4, 6), torch.randn(6)
        >>> for found in find_valid_placements(torch.ops.aten.mv.default, (x, y), {}):
        ...     print(found.inputs[0], "->", *map(repr, found.outputs[0]))
        (Replicate(), Partial(sum)) -> Partial(sum)
        (Shard(dim=0), Replicate()) -> Shard(dim=0)
        (Shard(dim=1), Shard(dim=0)) -> Partial(sum)
        (Partial(sum), Replicate()) -> Partial(sum)
    """
    call, sample = call_of(op, args, kwargs)
    _check_operands(op, sample)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        draws = _draw(Sampler(call, sample, torch.Generator("cpu").manual_seed(seed)))
        return _search(call, draws, axis_size, most)


def _check_operands(op: Any, sample: Sequence[Tensor]) -> None:
    name = str(op)
    if op._schema.is_mutable:
        raise NotJudgedError(f"{name} writes to an operand.")
    if torch.Tag.nondeterministic_seeded in op.tags:
        raise NotJudgedError(f"{name} is random.")
    if "empty" in name:
        raise NotJudgedError(f"{name} does not say what its result holds.")
    if not sample:
        raise NotJudgedError(f"{name} is called without a tensor.")
    if any(x.layout != torch.strided or x.is_quantized or x.dtype == torch.complex32 for x in sample):
        raise NotJudgedError(f"{name} is called with a tensor that is sparse, quantized or complex in half precision.")


@dataclass(frozen=True, slots=True)
class _Draw:
    """Operands, and the results of the call on these operands."""

    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]


def _draw(sampler: Sampler) -> list[_Draw]:
    """Return the call's own operands, then accepted operands whose results can expose a wrong placement."""
    call, sample = sampler.call, sampler.sample
    own = call.attempt(sample)
    if own is None:
        raise NotJudgedError(f"{call.operator} refuses its own operands.")
    if not own:
        raise NotJudgedError(f"{call.operator} gives no tensor.")
    if any(x.numel() == 0 for x in (*own, *sample)):
        raise NotJudgedError(f"{call.operator} is called with an empty tensor, or gives one.")
    again = call.run(sample)
    if not all(agree(x, y) for x, y in zip(own, again, strict=True)):
        raise NotJudgedError(f"{call.operator} is random.")
    count = max(_FEWEST_DRAWS, min(_MOST_DRAWS, _ELEMENTS // min(x.numel() for x in (*own, *sample))))
    found = [_Draw(tuple(sample), tuple(own)), *_other_draws(sampler, [x.shape for x in own], count)]
    finite = [draw for draw in found if all(map(_is_finite, draw.results))]
    if not finite:
        raise NotJudgedError(f"{call.operator} gives no finite results.")
    return [finite[index % len(finite)] for index in range(count)]


def _other_draws(sampler: Sampler, shapes: Sequence[torch.Size], count: int) -> Iterator[_Draw]:
    """Yield draws of small integers and of three scales in turn; indices stay if the operator refuses other indices."""
    for number in range(count):
        kind = number % (len(_SCALES) + 1)
        new = sampler.draw({}, _SCALES[kind - 1])
        if not kind:
            new = tuple(_small_integers(sampler, x) for x in sampler.sample)
        is_pointwise = torch.Tag.pointwise in getattr(sampler.call.operator, "tags", ())
        new = tuple(_random_integers(sampler, x) if x.dtype == torch.bool or is_pointwise else x for x in new)
        kept = tuple(old if _is_index(old) else x for old, x in zip(sampler.sample, new, strict=True))
        for operands in (new, kept):
            results = sampler.call.attempt(operands)
            if results is not None and [x.shape for x in results] == list(shapes):
                yield _Draw(operands, tuple(results))
                break


def _random_integers(sampler: Sampler, x: Tensor) -> Tensor:
    """Return random booleans and integers, and unchanged floats; not for integers that are indices."""
    if _is_number(x):
        return x
    noise = sampler.noise(torch.empty(0, dtype=torch.float64), x.shape)
    return noise > 0 if x.dtype == torch.bool else (4 * noise).round().clamp(_lowest(x), 9).to(x.dtype)


def _lowest(x: Tensor) -> int:
    return -9 if x.dtype.is_signed else 0


def _small_integers(sampler: Sampler, x: Tensor) -> Tensor:
    """Return floats with whole values, many of which are equal or zero; indices and masks stay unchanged."""
    if _is_index(x):
        return x
    noise = sampler.noise(x, x.shape)
    return torch.complex(noise.real.round(), noise.imag.round()) if x.is_complex() else noise.round()


def _is_number(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _is_index(x: Tensor) -> bool:
    return not _is_number(x)


def _is_finite(x: Tensor) -> bool:
    return bool(x.isfinite().all())


def _search(call: SampledCall, draws: Sequence[_Draw], axis_size: int, most: int) -> tuple[ValidPlacement, ...]:
    relevant = [_is_relevant(call, index, draws) for index in range(len(draws[0].operands))]
    choices = [
        _candidates(x, axis_size, with_partials=matters and not _is_beside_floats(x, draws[0].operands))
        for x, matters in zip(draws[0].operands, relevant, strict=True)
    ]
    trials = [_Trial(call, draw, choices, axis_size) for draw in draws]
    groups: dict[Any, list[Placements]] = {}
    for indices in _combinations(choices, most):
        labels = _labels(trials, indices)
        if labels is None:
            continue
        inputs = tuple(choice[index] for choice, index in zip(choices, indices, strict=True))
        key = tuple(place if matters else None for place, matters in zip(inputs, relevant, strict=True))
        if not _is_trivial(key, labels):
            groups.setdefault((key, labels), []).append(inputs)
    return tuple(ValidPlacement(tuple(inputs), labels) for (_, labels), inputs in groups.items())


def _is_relevant(call: SampledCall, index: int, draws: Sequence[_Draw]) -> bool:
    """Whether some result depends on the values of an operand; every result may depend on its shape."""
    if len(draws) == 1:
        return True
    for draw, other in zip(draws, [*draws[1:], draws[0]], strict=True):
        operands = list(draw.operands)
        operands[index] = other.operands[index]
        results = call.attempt(operands)
        if results is None or not all(agree(x, y) for x, y in zip(results, draw.results, strict=True)):
            return True
    return False


def _is_beside_floats(x: Tensor, operands: Sequence[Tensor]) -> bool:
    return _is_index(x) and any(map(_is_number, operands))


def _candidates(x: Tensor, axis_size: int, *, with_partials: bool) -> list[Placement]:
    """Return every placement of an operand: whole, split along each dim that `axis_size` divides, or a partial sum."""
    shards = [Shard(dim) for dim, size in enumerate(x.shape) if size and size % axis_size == 0]
    sums = [Partial("sum")] if with_partials and x.dtype != torch.bool else []
    return [Replicate(), *shards, *sums]


def _has_reduction(x: Tensor, reduction: str) -> bool:
    """Whether ranks can reduce values of this type by `reduction`.

    Booleans do not add up, complex numbers only add up or average, and integers have no average.
    """
    if x.dtype == torch.bool:
        return reduction in ("max", "min")
    if x.is_complex():
        return reduction in ("sum", "avg")
    return reduction != "avg" or x.is_floating_point()


def _combinations(choices: Sequence[Sequence[Placement]], most: int) -> Iterator[tuple[int, ...]]:
    """Return indices into `choices`; beyond the limit, only combinations without partial values, which come last."""
    if math.prod(map(len, choices)) > most:
        choices = [[place for place in choice if not isinstance(place, Partial)] for choice in choices]
    yield from islice(product(*(range(len(choice)) for choice in choices)), most)


def _is_trivial(key: tuple[Placement | None, ...], labels: tuple[frozenset[Placement], ...]) -> bool:
    """Whether every rank has all operands that matter whole, and computes all results whole."""
    return all(place in (None, Replicate()) for place in key) and all(Replicate() in found for found in labels)


class _Trial:
    """One draw, with its operands cut by the placements of a combination."""

    def __init__(self, call: SampledCall, draw: _Draw, choices: Sequence[Sequence[Placement]], axis_size: int) -> None:
        self._call = call
        self._draw = draw
        self._choices = choices
        self._axis_size = axis_size
        self._pieces: dict[tuple[int, int], list[Tensor]] = {}
        self.wholes = [_Whole(x) for x in draw.results]

    def run(self, indices: Sequence[int]) -> list[list[np.ndarray]] | None:
        """Return the pieces of each result by rank; None if a rank's call fails, or a piece has a wrong shape."""
        cut = [self._cut(operand, index) for operand, index in enumerate(indices)]
        ranks: list[list[Tensor]] = []
        for operands in zip(*cut, strict=True):
            results = self._call.attempt(operands)
            if results is None or not self._may_fit(results):
                return None
            ranks.append(results)
        return [[_array(piece) for piece in pieces] for pieces in zip(*ranks, strict=True)]

    def _may_fit(self, results: Sequence[Tensor]) -> bool:
        return len(results) == len(self.wholes) and all(
            piece.dtype == whole.dtype and _piece_of(piece.shape, whole.shape, self._axis_size)
            for piece, whole in zip(results, self._draw.results, strict=True)
        )

    def _cut(self, operand: int, index: int) -> list[Tensor]:
        if (operand, index) not in self._pieces:
            x, place = self._draw.operands[operand], self._choices[operand][index]
            self._pieces[operand, index] = _cut(x, place, self._axis_size)
        return self._pieces[operand, index]


def _cut(x: Tensor, place: Placement, count: int) -> list[Tensor]:
    if isinstance(place, Shard):
        return [piece.contiguous() for piece in x.chunk(count, place.dim)]
    if isinstance(place, Partial):
        return addends(x, Reduction(place.reduce_op), count)
    return [x] * count


def _piece_of(piece: Sequence[int], whole: Sequence[int], count: int) -> bool:
    """Whether a piece of this shape may be the whole, or one of `count` pieces along a dim."""
    if len(piece) != len(whole):
        return False
    differing = [(part, size) for part, size in zip(piece, whole, strict=True) if part != size]
    return not differing or (len(differing) == 1 and differing[0][0] * count == differing[0][1])


def _labels(trials: Sequence[_Trial], indices: Sequence[int]) -> tuple[frozenset[Placement], ...] | None:
    """Return, for each result, the placements that are true of its pieces on all draws; None without a placement."""
    found: list[Sequence[Placement]] = [()] * len(trials[0].wholes)
    for trial in trials:
        results = trial.run(indices)
        if results is None:
            return None
        for index, (pieces, whole) in enumerate(zip(results, trial.wholes, strict=True)):
            open_labels = found[index] if trial is not trials[0] else whole.possible(pieces[0])
            found[index] = whole.labels(pieces, open_labels)
            if not found[index]:
                return None
    return tuple(map(frozenset, found))


class _Whole:
    """A result on one device, with which pieces are compared."""

    def __init__(self, x: Tensor) -> None:
        self._x = _array(x)
        self._reductions = [name for name in _REDUCERS if _has_reduction(x, name)]
        relative, absolute = (1e-7, 1e-11) if x.dtype in (torch.float64, torch.complex128) else (1e-3, 1e-5)
        magnitude = np.abs(self._x) if _is_number(x) else np.zeros(())
        self._tolerance = relative * magnitude + absolute * magnitude.max()

    def possible(self, piece: np.ndarray) -> list[Placement]:
        """Return the placements that are possible by the shape of a piece."""
        if piece.shape != self._x.shape:
            return [Shard(dim) for dim, size in enumerate(self._x.shape) if piece.shape[dim] != size]
        return [Replicate(), *(Partial(name) for name in self._reductions)]

    def labels(self, pieces: Sequence[np.ndarray], places: Sequence[Placement]) -> list[Placement]:
        """Return the `places` under which the pieces form the whole."""
        if len({piece.shape for piece in pieces}) > 1:
            return []
        return [place for place in places if self._is_made_up(place, pieces)]

    def _is_made_up(self, place: Placement, pieces: Sequence[np.ndarray]) -> bool:
        if isinstance(place, Shard):
            return self._agrees(np.concatenate(pieces, place.dim))
        if isinstance(place, Replicate):
            return all(map(self._agrees, pieces))
        assert isinstance(place, Partial)
        with np.errstate(all="ignore"):
            return self._agrees(_REDUCERS[place.reduce_op](pieces))

    def _agrees(self, found: np.ndarray) -> bool:
        """Whether values equal the result up to rounding; values that are not a number never do.

        The tolerance is relative to each element and, far less, to the largest element.
        """
        if self._x.dtype.kind in "iub":
            return np.array_equal(found, self._x)
        with np.errstate(invalid="ignore"):
            return bool((np.abs(found - self._x) <= self._tolerance).all())


def _array(x: Tensor) -> np.ndarray:
    x = x.detach().resolve_conj().resolve_neg()
    return x.to(_IN_NUMPY.get(x.dtype, x.dtype)).numpy()


_IN_NUMPY = {torch.bfloat16: torch.float32, torch.complex32: torch.complex64}
"""Types without a numpy type, and the types of their comparison."""


def _average(pieces: Sequence[np.ndarray]) -> np.ndarray:
    return reduce(np.add, pieces) / len(pieces)


_REDUCERS: Mapping[str, Callable[[Sequence[np.ndarray]], np.ndarray]] = {
    "sum": partial(reduce, np.add),
    "max": partial(reduce, np.maximum),
    "min": partial(reduce, np.minimum),
    "product": partial(reduce, np.multiply),
    "avg": _average,
}
"""Functions that reduce the pieces of all ranks to the whole, by reduction."""
