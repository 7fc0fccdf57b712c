"""Philox 4x32-10: random numbers that depend on an element's global index, and not on the rank that draws them.

Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), section 3.3. The generator maps a
counter of 128 bits and a key to four words of 32 bits. A *site* is the number of a random operator in its program.
Element number i (row-major) of the whole array drawn at a site takes the words

    philox(counter = (i mod 2^32, i div 2^32, site, block), key = (seed mod 2^32, seed div 2^32)).

So every shard of an array, on any mesh, draws the same numbers as the whole array. Dropout takes the first word of
block 0. Other distributions take all four words. Distributions that reject numbers take more blocks. Arithmetic is
int64 with 32 bit masks, and therefore equal on every device. `kernels/triton_dropout.py` draws the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

ROUNDS = 10
_MASK = 0xFFFFFFFF
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox_4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Return four random words for each counter: int64 tensors of the broadcast shape, with values in [0, 2^32).

    `counter` has four int64 tensors of 32 bit words, low word first, and `key` has two. All tensors are broadcast.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high_0, low_0 = _multiply(c0, _MULTIPLIER_0)
        high_1, low_1 = _multiply(c2, _MULTIPLIER_1)
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3


def random_words(
    shape: Sequence[int], offset: Sequence[int], global_shape: Sequence[int], seed: Tensor, site: int
) -> Tensor:
    """Return a random word of 32 bits for each element of one shard of a global array.

    Args:
        offset: the global index of the shard's first element, one entry per dim.
        global_shape: the shape of the whole array. Elements beyond it (padding) get meaningless words.
        seed: int64 scalar tensor. The result is on its device.
        site: the number of the random operator in the program, in [0, 2^32).

    Returns:
        int64 tensor of `shape`, values in [0, 2^32).

    Raises:
        ValueError: shape, offset and global_shape differ in length.

    Example:
        >>> seed = torch.tensor(7)
        >>> whole = random_words((4, 6), (0, 0), (4, 6), seed, site=3)
        >>> torch.equal(whole[2:, 3:], random_words((2, 3), (2, 3), (4, 6), seed, site=3))
        True
    """
    return random_block(shape, offset, global_shape, seed, site)[0]


def random_block(
    shape: Sequence[int], offset: Sequence[int], global_shape: Sequence[int], seed: Tensor, site: int, block: int = 0
) -> Words:
    """Return four random words in [0, 2^32) for each element of one shard of a global array.

    Different numbers `block` give independent words. The other arguments are those of `random_words`.
    """
    index = _global_index(shape, offset, global_shape, seed.device)
    seed = seed.reshape(())
    zero = torch.zeros_like(seed)
    counter = (index & _MASK, (index >> 32) & _MASK, zero + (site & _MASK), zero + (block & _MASK))
    key = (seed & _MASK, (seed >> 32) & _MASK)
    return philox_4x32(counter, key)


def keep_mask(
    shape: Sequence[int],
    offset: Sequence[int],
    global_shape: Sequence[int],
    seed: Tensor,
    site: int,
    p: float,
) -> Tensor:
    """Return a bool tensor of `shape`, True with probability 1 - p, where dropout keeps an element of the shard.

    The other arguments are those of `random_words`.
    """
    return random_words(shape, offset, global_shape, seed, site) >= drop_threshold(p)


def drop_threshold(p: float) -> int:
    """Return `floor(p * 2^32)`. Dropout drops an element if its random word is below this integer.

    Raises:
        ValueError: p is not a probability.
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability p={p!r} must lie between 0 and 1.")
    return math.floor(p * 2**32)


def keep_scale(p: float) -> float:
    """Return `1 / (1 - p)`, the factor of dropout on kept elements, or 0 if p is 1."""
    return 0.0 if p >= 1.0 else 1.0 / (1.0 - p)


def _multiply(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """Return the high and the low word of a product of two 32 bit words, whose 64 bits an int64 keeps."""
    product = word * multiplier
    return (product >> 32) & _MASK, product & _MASK


def _global_index(
    shape: Sequence[int], offset: Sequence[int], global_shape: Sequence[int], device: torch.device
) -> Tensor:
    """Return an int64 tensor of `shape` with the row-major number of each element in the global array."""
    if not len(shape) == len(offset) == len(global_shape):
        raise ValueError(
            f"shape={tuple(shape)}, offset={tuple(offset)} and global_shape={tuple(global_shape)} "
            "must have one entry per dim each."
        )
    index = torch.zeros((), dtype=torch.int64, device=device)
    for size, start, whole in zip(shape, offset, global_shape, strict=True):
        along = torch.arange(size, dtype=torch.int64, device=device) + start
        index = (index * whole).unsqueeze(-1) + along
    return index
