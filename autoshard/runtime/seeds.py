"""Seeds of random operators: the same on every rank without communication, and for every mesh."""

from __future__ import annotations

import torch

_MASK = (1 << 64) - 1
_SIGN = 1 << 63
_CPU = torch.device("cpu")


class SeedSequence:
    """One seed per call that draws, and per micro-batch, from torch's initial seed and the number of those so far.

    After `torch.manual_seed(s)` with another `s` than before, the module starts the sequence of `s`; with
    the same `s`,
    `restart` does. Ranks must set equal seeds; they compare them when they compile and when the seed changes.
    A state that is loaded goes on with the sequence that it was saved from, whatever torch's seed is then.
    """

    def __init__(self) -> None:
        self.base = self._seen = torch.initial_seed()
        self.count = 0

    @property
    def is_outdated(self) -> bool:
        """Whether torch was given another seed since."""
        return torch.initial_seed() != self._seen

    def restart(self, count: int = 0) -> None:
        """Go on after `count` calls of the sequence of torch's present seed."""
        self.base, self.count = torch.initial_seed(), count
        self._seen = self.base

    def state(self) -> torch.Tensor:
        """The sequence and the number of calls so far, to go on from: int64[2]."""
        base = (self.base & _MASK) - ((self.base & _SIGN) << 1)
        return torch.tensor([base, self.count], dtype=torch.int64)

    def load(self, state: torch.Tensor) -> None:
        """Go on from where `state` was taken."""
        base, count = state.tolist()
        self.base, self.count, self._seen = base & _MASK, count, torch.initial_seed()

    def describe(self) -> str:
        """Where the sequence stands at the next call, for messages: `0, from which 4 calls have drawn`."""
        base, count = (torch.initial_seed(), 0) if self.is_outdated else (self.base, self.count)
        return f"{base}{f', from which {count} calls have drawn' if count else ''}"

    def peek(self, device: torch.device = _CPU) -> torch.Tensor:
        """The next seed, a 0-dim int64 tensor, which stays the next; the device gets it as an argument of a kernel."""
        seed = _mix(self.base + (self.count + 1) * _GOLDEN) >> 1
        return torch.full((), seed, dtype=torch.int64, device=device)

    def draw(self) -> torch.Tensor:
        """The next seed."""
        seed = self.peek()
        self.count += 1
        return seed


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
