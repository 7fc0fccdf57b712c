"""Seeds of random operators: equal on every rank without communication, and for every mesh."""

from __future__ import annotations

from collections.abc import Callable

import torch

from autoshard.runtime.generator_marks import Mark

_MASK = (1 << 64) - 1
_SIGN = 1 << 63
_CPU = torch.device("cpu")

_STRIDE = 4096
"""Numbers by which a call that draws advances torch's generator; 20 us.

A user who draws fewer numbers than this after a seed never reaches the state in which a call left the generator.
"""

_KNOWN = 4096
"""The number of remembered states of torch's generator."""


class SeedSequence:
    """One seed per call that draws, and per micro-batch, from torch's initial seed and the number of earlier draws.

    A call that draws advances torch's generator, and moving the generator back moves the sequence back, as on one
    device. Setting a seed (even the same seed), leaving `torch.random.fork_rng` and setting a state move it back. Draws
    in the user's own code do not move the sequence, so ranks may draw different numbers there.

    Ranks must set equal seeds; they compare them when they compile and when the sequence moves.
    After `load`, the sequence continues from the saved state, independent of torch's seed.
    """

    def __init__(self) -> None:
        self.base, self.count = torch.initial_seed(), 0
        self._left = Mark.now()
        self._known = {self._left: (self.base, 0)}
        self._is_loaded = False

    def __reduce__(self) -> tuple[Callable[[torch.Tensor], SeedSequence], tuple[torch.Tensor]]:
        """Pickle or copy the state, without the states of this process's generator."""
        return _loaded, (self.state(),)

    @property
    def is_outdated(self) -> bool:
        """Whether torch's generator was moved to a state that belongs to another place in the sequence."""
        return self._find() != (self.base, self.count)

    def renew(self) -> None:
        """Move the sequence to the place of torch's present generator state."""
        self.base, self.count = self._find()

    def restart(self, count: int = 0) -> None:
        """Continue after `count` calls from torch's present seed."""
        self.base, self.count, self._is_loaded = torch.initial_seed(), count, False
        self._leave()

    def state(self) -> torch.Tensor:
        """The sequence and the number of calls so far: int64[2]."""
        base, count = self._find()
        return torch.tensor([(base & _MASK) - ((base & _SIGN) << 1), count], dtype=torch.int64)

    def load(self, state: torch.Tensor) -> None:
        """Continue from a `state`."""
        base, count = state.tolist()
        self.base, self.count, self._is_loaded = base & _MASK, count, True
        self._left = Mark.now()
        self._known = {}

    def describe(self) -> str:
        """The place of the next call in the sequence, for messages: `0, from which 4 calls have drawn`."""
        base, count = self._find()
        return f"{base}{f', from which {count} calls have drawn' if count else ''}"

    def peek(self, device: torch.device = _CPU) -> torch.Tensor:
        """The next seed, without drawing it: a 0-dim int64 tensor, which a device gets as a kernel argument."""
        seed = _mix(self.base + (self.count + 1) * _GOLDEN) >> 1
        return torch.full((), seed, dtype=torch.int64, device=device)

    def draw(self) -> torch.Tensor:
        """Draw the next seed; torch's generator advances."""
        seed = self.peek()
        self._leave()
        torch.empty(_STRIDE, dtype=torch.int32, device=_CPU).random_()
        self.count += 1
        self._leave()
        self._is_loaded = False
        return seed

    def _leave(self) -> None:
        """Remember the present place in the sequence for the present state of torch's generator."""
        self._left = Mark.now()
        self._known.pop(self._left, None)
        self._known[self._left] = self.base, self.count
        if len(self._known) > _KNOWN:
            del self._known[next(iter(self._known))]

    def _find(self) -> tuple[int, int]:
        """Base and count for the present state of torch's generator.

        1. In a remembered state, the sequence has the place it had then.
        2. After a new seed, the sequence begins.
        3. In a state after the last one, the place is unchanged: other code drew.
        4. In any other state, the sequence has the place of the nearest earlier state; without one, it begins.
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
        """Whether no seed was set since `load`; torch's own state may be loaded after it."""
        return self._is_loaded and now.seed in (self._left.seed, self.base) and not now.is_fresh


def _loaded(state: torch.Tensor) -> SeedSequence:
    result = SeedSequence()
    result.load(state)
    return result


def seed_of_weights(seed: int) -> int:
    """The seed for initialisers, which differs from the seeds of all calls; fits in an int64."""
    return _mix(_mix(seed ^ _WEIGHTS)) >> 1


_WEIGHTS = 0x77656967687473
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(value: int) -> int:
    """The output function of SplitMix64 (Steele, Lea, Flood 2014, figure 18): neighbours become unrelated."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
