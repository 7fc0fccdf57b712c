"""Seeds of random operators: the same on every rank without communication, and for every mesh."""

from __future__ import annotations

from collections.abc import Callable

import torch

from autoshard.runtime.generator_marks import Mark

_MASK = (1 << 64) - 1
_SIGN = 1 << 63
_CPU = torch.device("cpu")

_STRIDE = 4096
"""Numbers by which a call that draws moves torch's generator; 20 us.

Fewer numbers that somebody else draws behind a seed never end where a call did.
"""

_KNOWN = 4096
"""Places of torch's generator that are remembered."""


class SeedSequence:
    """One seed per call that draws, and per micro-batch, from torch's initial seed and the number of those so far.

    As on one device, a call that draws moves torch's generator on, and whoever moves the generator back (a seed that
    is set, the same one too; the end of `torch.random.fork_rng`; a state that is set) moves the sequence back. Numbers
    that are drawn elsewhere do not move the sequence, so ranks may draw unlike numbers of them.

    Ranks must set equal seeds; they compare them when they compile and when the sequence moves.
    A state that is loaded goes on with the sequence that it was saved from, whatever torch's seed is then.
    """

    def __init__(self) -> None:
        self.base, self.count = torch.initial_seed(), 0
        self._left = Mark.now()
        self._known = {self._left: (self.base, 0)}
        self._is_loaded = False

    def __reduce__(self) -> tuple[Callable[[torch.Tensor], SeedSequence], tuple[torch.Tensor]]:
        """How to copy or pickle it: places of the generator are those of one process."""
        return _loaded, (self.state(),)

    @property
    def is_outdated(self) -> bool:
        """Whether torch's generator was moved to where the sequence is another, or was elsewhere."""
        return self._find() != (self.base, self.count)

    def renew(self) -> None:
        """Go where torch's generator is now."""
        self.base, self.count = self._find()

    def restart(self, count: int = 0) -> None:
        """Go on after `count` calls of the sequence of torch's present seed."""
        self.base, self.count, self._is_loaded = torch.initial_seed(), count, False
        self._leave()

    def state(self) -> torch.Tensor:
        """The sequence and the number of calls so far, to go on from: int64[2]."""
        base, count = self._find()
        return torch.tensor([(base & _MASK) - ((base & _SIGN) << 1), count], dtype=torch.int64)

    def load(self, state: torch.Tensor) -> None:
        """Go on from where `state` was taken."""
        base, count = state.tolist()
        self.base, self.count, self._is_loaded = base & _MASK, count, True
        self._left = Mark.now()
        self._known = {}

    def describe(self) -> str:
        """Where the sequence stands at the next call, for messages: `0, from which 4 calls have drawn`."""
        base, count = self._find()
        return f"{base}{f', from which {count} calls have drawn' if count else ''}"

    def peek(self, device: torch.device = _CPU) -> torch.Tensor:
        """The next seed, a 0-dim int64 tensor, which stays the next; the device gets it as an argument of a kernel."""
        seed = _mix(self.base + (self.count + 1) * _GOLDEN) >> 1
        return torch.full((), seed, dtype=torch.int64, device=device)

    def draw(self) -> torch.Tensor:
        """The next seed; torch's generator moves on."""
        seed = self.peek()
        self._leave()
        torch.empty(_STRIDE, dtype=torch.int32, device=_CPU).random_()
        self.count += 1
        self._leave()
        self._is_loaded = False
        return seed

    def _leave(self) -> None:
        """Remember that the sequence stands where it does while torch's generator is where it is."""
        self._left = Mark.now()
        self._known.pop(self._left, None)
        self._known[self._left] = self.base, self.count
        if len(self._known) > _KNOWN:
            del self._known[next(iter(self._known))]

    def _find(self) -> tuple[int, int]:
        """Base and count where torch's generator is now.

        1. Where the sequence was before, it is what it was then.
        2. Behind a seed that is new to it, it begins.
        3. Further on than it was left, it is what it was: somebody else drew.
        4. Elsewhere, it is what it was at the last place before, where there is one; else it begins.
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
        """Whether nobody set a seed since a state was loaded; torch's own state may be loaded after it."""
        return self._is_loaded and now.seed in (self._left.seed, self.base) and not now.is_fresh


def _loaded(state: torch.Tensor) -> SeedSequence:
    result = SeedSequence()
    result.load(state)
    return result


def seed_of_weights(seed: int) -> int:
    """The seed of what initialisers draw, unlike that of any call's random operators; fits in an int64."""
    return _mix(_mix(seed ^ _WEIGHTS)) >> 1


_WEIGHTS = 0x77656967687473
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(value: int) -> int:
    """The output function of SplitMix64 (Steele, Lea, Flood 2014, figure 18): neighbours become unrelated."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
