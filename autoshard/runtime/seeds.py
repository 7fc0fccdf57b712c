"""`SeedSequence`: the seeds of random operators, equal on all ranks without communication, and for every mesh."""

from __future__ import annotations

from collections.abc import Callable

import torch

from autoshard.runtime.generator_marks import Mark

_MASK = (1 << 64) - 1
_SIGN = 1 << 63
_CPU = torch.device("cpu")

_STRIDE = 4096
"""A call that draws advances torch's generator by this many numbers, which takes 20 us.

A user who draws fewer numbers after a seed never reaches a state in which a call left the generator.
"""

_KNOWN = 4096
"""The most states of torch's generator that are remembered."""


class SeedSequence:
    """A sequence of seeds: one seed for each call, or micro-batch, that draws random numbers.

    The place in the sequence is torch's initial seed (`base`) and the number of earlier draws (`count`).

    A call that draws advances torch's CPU generator. If the user moves the generator back (by a seed, a state, or
    leaving `torch.random.fork_rng`), the sequence moves back too, as on one device. Draws in the user's own code do not
    move the sequence.

    Ranks must set equal seeds. They compare seeds when they compile, and when the user has moved the sequence. After
    `load`, the sequence continues from the saved state, independent of torch's seed.
    """

    def __init__(self) -> None:
        self.base, self.count = torch.initial_seed(), 0
        self._left = Mark.now()
        self._known = {self._left: (self.base, 0)}
        self._is_loaded = False

    def __reduce__(self) -> tuple[Callable[[torch.Tensor], SeedSequence], tuple[torch.Tensor]]:
        """Pickle or copy the place in the sequence, without the remembered states of this process's generator."""
        return _loaded, (self.state(),)

    @property
    def is_outdated(self) -> bool:
        """Whether the user moved torch's generator, so that its state belongs to another place in the sequence."""
        return self._place_of_generator() != (self.base, self.count)

    def renew(self) -> None:
        """Move to the place in the sequence that belongs to the present state of torch's generator."""
        self.base, self.count = self._place_of_generator()

    def restart(self, count: int = 0) -> None:
        """Move to the place behind `count` draws in the sequence of torch's present seed."""
        self.base, self.count, self._is_loaded = torch.initial_seed(), count, False
        self._remember_state()

    def state(self) -> torch.Tensor:
        """Return the place in the sequence as int64[2], to save: the base, and the number of draws."""
        base, count = self._place_of_generator()
        return torch.tensor([(base & _MASK) - ((base & _SIGN) << 1), count], dtype=torch.int64)

    def load(self, state: torch.Tensor) -> None:
        """Move to a place that `state` returned. From then on, the sequence is independent of torch's seed."""
        base, count = state.tolist()
        self.base, self.count, self._is_loaded = base & _MASK, count, True
        self._left = Mark.now()
        self._known = {}

    def describe(self) -> str:
        """Return the place of the next call in the sequence as text, such as `0, from which 4 calls have drawn`."""
        base, count = self._place_of_generator()
        return f"{base}{f', from which {count} calls have drawn' if count else ''}"

    def peek(self, device: torch.device = _CPU) -> torch.Tensor:
        """Return the next seed without drawing it, as a 0-dim int64 tensor on `device`."""
        seed = _mix(self.base + (self.count + 1) * _GOLDEN) >> 1
        return torch.full((), seed, dtype=torch.int64, device=device)

    def draw(self) -> torch.Tensor:
        """Return the next seed, a 0-dim int64 tensor on the CPU, and advance the sequence and torch's generator."""
        seed = self.peek()
        self._remember_state()
        torch.empty(_STRIDE, dtype=torch.int32, device=_CPU).random_()
        self.count += 1
        self._remember_state()
        self._is_loaded = False
        return seed

    def _remember_state(self) -> None:
        """Remember that the present place in the sequence belongs to the generator's present state.

        The oldest of more than `_KNOWN` states is forgotten.
        """
        self._left = Mark.now()
        self._known.pop(self._left, None)
        self._known[self._left] = self.base, self.count
        if len(self._known) > _KNOWN:
            del self._known[next(iter(self._known))]

    def _place_of_generator(self) -> tuple[int, int]:
        """Return the base and count that belong to the present state of torch's generator.

        1. In a remembered state, the sequence has the place that it had then.
        2. After a new seed, the sequence begins.
        3. In a state after the last remembered state, the place is unchanged, because only other code drew.
        4. In any other state, the place is that of the nearest earlier remembered state, or the beginning.
        """
        now = Mark.now()
        if now == self._left or self._goes_on_loaded(now):
            return self.base, self.count
        if now in self._known:
            return self._known[now]
        behind = [mark for mark in reversed(self._known) if mark.seed == now.seed]
        if behind and now.seed == self._left.seed and now.follows(self._left):
            return self.base, self.count
        before = [mark for mark in behind if now.follows(mark)]
        last = max(before, key=lambda mark: (mark.block == now.block, mark.place, mark.drawn), default=None)
        return (now.seed, 0) if last is None else self._known[last]

    def _goes_on_loaded(self, now: Mark) -> bool:
        """Whether the sequence continues from the place that `load` set, because no seed was set since then.

        The sequence also continues if the user loads torch's own random state after `load`.
        """
        return self._is_loaded and now.seed in (self._left.seed, self.base) and not now.is_fresh


def _loaded(state: torch.Tensor) -> SeedSequence:
    result = SeedSequence()
    result.load(state)
    return result


def seed_of_weights(seed: int) -> int:
    """Return a seed for initialisers of weights, which fits in an int64 and is unrelated to the seeds of calls."""
    return _mix(_mix(seed ^ _WEIGHTS)) >> 1


_WEIGHTS = 0x77656967687473
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(value: int) -> int:
    """Return `value` with its bits mixed, so that near numbers become unrelated.

    The function is the output function of SplitMix64 (Steele, Lea, Flood 2014, figure 18).
    """
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
