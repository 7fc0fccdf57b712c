"""Digests of tensors' bits: equal values have equal digests on every rank, and a swap of two elements shows.

A digest is a multilinear hash (Carter and Wegman 1979, section 3): the tensor's memory is read as 64-bit words, each
is multiplied by an odd pseudo-random number that belongs to its position, and the products are summed, modulo 2^64.
Tensors longer than the table of such numbers are hashed block by block, and the digests of the blocks as a tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache

import torch

_BLOCK = 1 << 11
_AT_ONCE = 1 << 9
"""Blocks that are hashed at once: products of 8 MiB."""

_MASK = (1 << 64) - 1
_WORD = torch.int64


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor as a row of 64-bit words, the last one filled up with zeros.

    Returns:
        An int64 tensor, [bytes / 8]: a view where `tensor` is contiguous and its bytes are whole, aligned words.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.stride(0) != 1:  # of a single element, which is contiguous whatever its stride
        flat = flat.as_strided(flat.shape, (1,))
    itemsize = flat.element_size()
    if flat.numel() * itemsize % 8 == 0 and flat.storage_offset() * itemsize % 8 == 0:
        return flat.view(_WORD)
    data = flat.view(torch.uint8)
    padded = data.new_zeros(-(-data.numel() // 8) * 8)
    padded[: data.numel()] = data
    return padded.view(_WORD)


def digest_of_words(words: torch.Tensor) -> torch.Tensor:
    """The digest of a row of words: a 0-dim int64 tensor where the words are."""
    count = words.numel()
    if count <= _BLOCK:
        return (words * table_on(words.device).narrow(0, 0, count)).sum()
    whole = count // _BLOCK * _BLOCK
    rows = words.narrow(0, 0, whole).view(-1, _BLOCK).split(_AT_ONCE)
    blocks = [(some * table_on(words.device)).sum(1) for some in rows]
    return digest_of_words(torch.cat([*blocks, digest_of_words(words.narrow(0, whole, count - whole)).reshape(1)]))


def digest_of(tensor: torch.Tensor) -> str:
    """A digest of a tensor's shape, type and every element, as text."""
    value = 0 if tensor.is_meta else int(digest_of_words(words_of(tensor)))
    return hex_of(digest_of_text(f"{tuple(tensor.shape)} {tensor.dtype} {value}"))


def sample_of(words: torch.Tensor, most: int, turn: int) -> torch.Tensor:
    """At most so many of a tensor's words, spread over all of it, others at every `turn`."""
    count = words.numel()
    if count <= most:
        return words
    rows = min(_PIECES, most)
    width, length = most // rows, count // rows
    start = turn * width % (length - width + 1)
    return words.narrow(0, 0, rows * length).view(rows, length).narrow(1, start, width).reshape(-1)


def digest_of_text(text: str) -> int:
    """A digest of a text, that fits in an int64: the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def combine(digests: Sequence[int]) -> int:
    """One digest of several, in their order; fits in an int64."""
    return digest_of_text(",".join(map(str, digests))) if len(digests) != 1 else digests[0]


def hex_of(digest: int) -> str:
    """A digest as people read it: 16 hexadecimal digits."""
    return f"{digest & _MASK:016x}"


_PIECES = 32


@cache
def table_on(device: torch.device) -> torch.Tensor:
    """Odd pseudo-random numbers, the same on every rank: 16 KiB on a device for as long as the process lives."""
    generator = torch.Generator().manual_seed(0x5EED)
    bounds = torch.iinfo(_WORD)
    drawn = torch.randint(bounds.min, bounds.max, (_BLOCK,), generator=generator, dtype=_WORD, device="cpu")
    return (drawn | 1).to(device)
