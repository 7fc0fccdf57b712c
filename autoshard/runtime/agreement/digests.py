"""Digests of tensors' bits: equal on every rank for equal tensors, and different if two unequal elements are swapped.

A digest of a whole tensor is a multilinear hash (Carter and Wegman 1979, section 3). Each 64-bit word is multiplied by
the odd pseudo-random number of its position, and the products are summed modulo 2^64. Longer tensors than the table of
numbers are hashed block by block. Samples of tensors on the CPU are hashed by BLAKE2, which is faster for few bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
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
    flat = tensor.detach().contiguous().reshape(-1)
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


def digest_of_samples(tensors: Sequence[torch.Tensor], most: int, turn: int) -> int | torch.Tensor:
    """Return a digest of tensors on one device, from a sample of each tensor's bytes and the sum of its 64-bit words.

    A tensor of at most `most` bytes is read whole. A swap of two values does not change the sum, and shows only if
    the sample contains one of the values. Each `turn` samples other bytes. The digest is an int on the CPU, else a
    0-dim int64 tensor.
    """
    if tensors[0].device.type == "cpu":
        memories = [bytes_of(tensor) for tensor in tensors]
        sums = [_sum_of_words(memory) for memory in memories if len(memory) > most]
        return digest_of_bytes([*(_sample_of_bytes(memory, most, turn) for memory in memories), *sums])
    rows = [words_of(tensor) for tensor in tensors]
    sums = [words.sum().reshape(1) for words in rows if len(words) > most // 8]
    return digest_of_words(torch.cat([*(sample_of(words, most // 8, turn) for words in rows), *sums]))


def sample_of(words: torch.Tensor, most: int, turn: int) -> torch.Tensor:
    """Return at most `most` of `words` [n], spread over all of them. Each turn takes other words."""
    if len(words) <= most:
        return words
    rows, length, start, width = _spread(len(words), most, turn)
    return words.narrow(0, 0, rows * length).view(rows, length).narrow(1, start, width).reshape(-1)


def _sample_of_bytes(memory: npt.NDArray[np.uint8], most: int, turn: int) -> npt.NDArray[np.uint8]:
    if len(memory) <= most:
        return memory
    rows, length, start, width = _spread(len(memory), most, turn)
    return memory[: rows * length].reshape(rows, length)[:, start : start + width].reshape(-1)


def _sum_of_words(memory: npt.NDArray[np.uint8]) -> bytes:
    """Return the sum modulo 2^64 of the 64-bit words of `memory`, followed by its bytes after the last whole word."""
    whole = len(memory) // 8 * 8
    return memory[:whole].view(np.uint64).sum().tobytes() + memory[whole:].tobytes()


def _spread(count: int, most: int, turn: int) -> tuple[int, int, int, int]:
    """Cut `count` items into equal rows, and choose the columns of the rows that a sample takes.

    The sample has at most `most` items. Return the number of rows, their length, the first column of the sample, and
    the number of its columns.
    """
    rows = min(_PIECES, most)
    width, length = most // rows, count // rows
    return rows, length, turn * width % (length - width + 1), width


def bytes_of(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Return the memory of a tensor as a NumPy array of uint8 [bytes]: a view of the memory if no copy is needed."""
    known = (
        tensor
        if tensor.dtype in _OF_NUMPY
        else tensor.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
    )
    return np.ascontiguousarray(known.numpy(force=True)).reshape(-1).view(np.uint8)


def digest_of_bytes(pieces: Iterable[Any]) -> int:
    """Return one digest of several buffers, in their order. It fits in an int64, and is the same in every process."""
    found = hashlib.blake2b(digest_size=8)
    for piece in pieces:
        found.update(piece)
    return int.from_bytes(found.digest(), "little", signed=True)


def digest_of_text(text: str) -> int:
    """Return a digest of a text. It fits in an int64, and is the same in every process."""
    return digest_of_bytes([text.encode()])


def combine(digests: Sequence[int]) -> int:
    """Return one digest of several digests, in their order. It fits in an int64."""
    return digest_of_text(",".join(map(str, digests))) if len(digests) != 1 else digests[0]


def hex_of(digest: int) -> str:
    """Return a digest as 16 hexadecimal digits."""
    return f"{digest & _MASK:016x}"


_PIECES = 32
_OF_NUMPY = {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool}
_OF_NUMPY |= {torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128}
"""Dtypes that NumPy has too."""


@cache
def table_on(device: torch.device) -> torch.Tensor:
    """Return `_BLOCK` odd pseudo-random int64 numbers, equal on every rank. They take 16 KiB, and are made once."""
    generator = torch.Generator().manual_seed(0x5EED)
    bounds = torch.iinfo(_WORD)
    drawn = torch.randint(bounds.min, bounds.max, (_BLOCK,), generator=generator, dtype=_WORD, device="cpu")
    return (drawn | 1).to(device)
