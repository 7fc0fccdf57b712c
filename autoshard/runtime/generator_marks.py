"""`Mark`: a short form of a state of torch's CPU generator, which can be compared and ordered.

The generator is a Mersenne Twister (Matsumoto and Nishimura 1998), which computes each block of 624 words from the
previous one. `torch.get_rng_state` gives the seed, the number of words drawn from the present block, the block, and a
cached normal number. The layout has not changed since torch 1. Two states after one seed are ordered by the number of
words drawn.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import torch

_WORDS = 624
_DRAWN, _BLOCK = slice(16, 24), slice(24, 24 + 8 * _WORDS)

_KNOWN_BLOCKS = 256
"""States within this many blocks after a seed can be ordered.

The blocks have 160,000 words, which take 2 ms to draw, once per seed.
"""


class Mark(NamedTuple):
    """A state of torch's CPU generator.

    Args:
        seed: the generator's seed.
        block: hash of the present block of words.
        drawn: number of words drawn from the block.
        rest: hash of the cached normal number.
    """

    seed: int
    block: int
    drawn: int
    rest: int

    @classmethod
    def of(cls, generator: torch.Generator) -> Mark:
        """Return the mark of a generator's present state."""
        state = generator.get_state().numpy().tobytes()
        drawn = int.from_bytes(state[_DRAWN], sys.byteorder)
        return cls(generator.initial_seed(), hash(state[_BLOCK]), drawn, hash(state[_BLOCK.stop :]))

    @classmethod
    def now(cls) -> Mark:
        """Return the mark of the present state of torch's default generator."""
        return cls.of(torch.default_generator)

    @property
    def place(self) -> tuple[float, int]:
        """The number of the block after the seed, and the words drawn from it; `(inf, 0)` behind the known blocks."""
        block = blocks_behind(self.seed).get(self.block)
        return (math.inf, 0) if block is None else (block, self.drawn)

    def follows(self, other: Mark) -> bool:
        """Whether this state is `other` or comes after it, for the same seed.

        States behind the known blocks count as last.
        """
        return self.drawn >= other.drawn if self.block == other.block else self.place >= other.place

    @property
    def is_fresh(self) -> bool:
        """Whether no number was drawn since the seed was set."""
        return self.place == (0, 0)


@lru_cache(8)
def blocks_behind(seed: int) -> Mapping[int, int]:
    """Return a dict from the hash of each known block after a seed to its number. Block 0 is that of the seed."""
    generator = torch.Generator().manual_seed(seed)
    numbers: dict[int, int] = {}
    for number in range(_KNOWN_BLOCKS):
        numbers[Mark.of(generator).block] = number
        torch.empty(_WORDS, dtype=torch.int32, device="cpu").random_(generator=generator)
    return numbers
