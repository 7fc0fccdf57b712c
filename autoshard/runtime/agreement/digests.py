"""Digests of tensors' bits: equal on every rank for equal tensors, and different if two unequal elements are swapped.

A digest of a tensor is a multilinear hash (Carter and Wegman 1979, section 3). Each 64-bit word is multiplied by the
odd pseudo-random number of its position, and the products are summed modulo 2^64. Longer tensors than the table of
numbers are hashed block by block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache

import torch

_BLOCK = 1 << 11
_AT_ONCE = 1 << 9
"""The number of blocks hashed at once. Their products take 8 MiB."""

_MASK = (1 << 64) - 1
_WORD = torch.int64


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor as int64 words [bytes / 8]. Zeros fill up the last word.

    The result is a view if the memory is contiguous and aligned.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.stride(0) != 1:  # a single element is contiguous with any stride
        flat = flat.as_strided(flat.shape, (1,))
    itemsize = flat.element_size()
    if flat.numel() * itemsize % 8 == 0 and flat.storage_offset() * itemsize % 8 == 0:
        return flat.view(_WORD)
    data = flat.view(torch.uint8)
    padded = data.new_zeros(-(-data.numel() // 8) * 8)
    padded[: data.numel()] = data
    return padded.view(_WORD)


def digest_of_words(words: torch.Tensor) -> torch.Tensor:
    """Return the digest of int64 words [n], a 0-dim int64 tensor on the same device."""
    count = words.numel()
    if count <= _BLOCK:
        return (words * table_on(words.device).narrow(0, 0, count)).sum()
    whole = count // _BLOCK * _BLOCK
    rows = words.narrow(0, 0, whole).view(-1, _BLOCK).split(_AT_ONCE)
    blocks = [(some * table_on(words.device)).sum(1) for some in rows]
    return digest_of_words(torch.cat([*blocks, digest_of_words(words.narrow(0, whole, count - whole)).reshape(1)]))


def digest_of(tensor: torch.Tensor) -> str:
    """Return a digest of a tensor's shape, dtype and every element, as 16 hexadecimal digits.

    A tensor on the meta device has no elements, so the digest is of its shape and dtype.
    """
    value = 0 if tensor.is_meta else int(digest_of_words(words_of(tensor)))
    return hex_of(digest_of_text(f"{tuple(tensor.shape)} {tensor.dtype} {value}"))


def digest_of_samples(tensors: Sequence[torch.Tensor], most: int, turn: int) -> torch.Tensor:
    """Return a digest of tensors on one device, from a sample of each tensor's words and the sum of its words.

    A tensor of at most `most` bytes is read whole. A swap of two values does not change the sum, and shows only if
    the sample contains one of the values. Each `turn` samples other words. The digest is a 0-dim int64 tensor.
    """
    rows = [words_of(tensor) for tensor in tensors]
    sums = [words.sum().reshape(1) for words in rows if len(words) > most // 8]
    return digest_of_words(torch.cat([*(sample_of(words, most // 8, turn) for words in rows), *sums]))


def sample_of(words: torch.Tensor, most: int, turn: int) -> torch.Tensor:
    """Return at most `most` of `words` [n], spread over all of them. Each turn takes other words.

    The words are cut into equal rows, and the sample is some neighbouring columns of the rows.
    """
    if len(words) <= most:
        return words
    rows = min(_PIECES, most)
    width, length = most // rows, len(words) // rows
    return (
        words.narrow(0, 0, rows * length)
        .view(rows, length)
        .narrow(1, turn * width % (length - width + 1), width)
        .reshape(-1)
    )


def digest_of_bytes(data: bytes) -> int:
    """Return a digest of bytes. It fits in an int64, and is the same in every process."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def digest_of_text(text: str) -> int:
    """Return a digest of a text. It fits in an int64, and is the same in every process."""
    return digest_of_bytes(text.encode())


def combine(digests: Sequence[int]) -> int:
    """Return one digest of several digests, in their order. It fits in an int64."""
    return digest_of_text(",".join(map(str, digests))) if len(digests) != 1 else digests[0]


def hex_of(digest: int) -> str:
    """Return a digest as 16 hexadecimal digits."""
    return f"{digest & _MASK:016x}"


_PIECES = 32


@cache
def table_on(device: torch.device) -> torch.Tensor:
    """Return `_BLOCK` odd pseudo-random int64 numbers, equal on every rank. They take 16 KiB, and are made once."""
    generator = torch.Generator().manual_seed(0x5EED)
    bounds = torch.iinfo(_WORD)
    drawn = torch.randint(bounds.min, bounds.max, (_BLOCK,), generator=generator, dtype=_WORD, device="cpu")
    return (drawn | 1).to(device)
