"""Digests of tensors depend on every element and its position."""

from __future__ import annotations

import pytest
import torch

from autoshard.runtime.agreement.digests import (
    digest_of,
    digest_of_samples,
    digest_of_words,
    sample_of,
    words_of,
)

TYPES = (torch.bool, torch.uint8, torch.float8_e5m2, torch.bfloat16, torch.int32, torch.float64, torch.complex64)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (5, 7), (0, 3)])
def test_equal_tensors_have_equal_digests(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """A tensor and its non-contiguous copy have equal digests, for any type and shape."""
    tensor = torch.arange(64).remainder(2).to(dtype)[: torch.Size(shape).numel()].reshape(shape)
    apart = torch.stack([tensor, tensor], -1)[..., 0]
    assert digest_of(tensor) == digest_of(apart)


@pytest.mark.parametrize("count", [6, 2048, 2049, 5000, 1 << 21])
def test_a_swap_shows(count: int) -> None:
    """A swap of two elements, which leaves the sum unchanged, changes the digest."""
    tensor = torch.arange(count, dtype=torch.float64)
    for first, second in ((0, 1), (0, count - 1), (count // 2, count // 2 + 1), (count - 2, count - 1)):
        swapped = tensor.clone()
        swapped[[first, second]] = tensor[[second, first]]
        assert digest_of(swapped) != digest_of(tensor)


def test_shape_and_type_count() -> None:
    """Zeros of different shapes or types have different digests."""
    zeros = [torch.zeros(8), torch.zeros(2, 4), torch.zeros(8, dtype=torch.int32), torch.zeros(7)]
    assert len({digest_of(item) for item in zeros}) == len(zeros)


def test_a_view_that_is_no_whole_words_has_a_digest() -> None:
    """A view whose memory begins between two 8-byte words has the digest of its copy."""
    tensor = torch.arange(9, dtype=torch.float32)
    assert digest_of(tensor[1:]) == digest_of(tensor[1:].clone())


def test_samples_reach_every_word() -> None:
    """Samples have at most 320 words, and 64 turns cover more than 99 % of all words."""
    words = words_of(torch.arange(10_000))
    seen: set[int] = set()
    for turn in range(64):
        sample = sample_of(words, 320, turn)
        assert sample.numel() <= 320
        seen |= set(sample.tolist())
    assert len(seen) > 9_900
    assert int(digest_of_words(sample_of(words[:100], 320, 5))) == int(digest_of_words(words[:100]))


def test_a_conjugate_has_the_digest_of_its_elements() -> None:
    """A lazily conjugated tensor has the digest of its elements, and not of the memory it shares."""
    tensor = torch.randn(5, 3, dtype=torch.complex64)
    assert digest_of(tensor.conj()) == digest_of(tensor.conj().resolve_conj()) != digest_of(tensor)


@pytest.mark.parametrize("size", [8, (1 << 15) + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.bfloat16, torch.int64])
def test_a_change_anywhere_shows_at_once(size: int, dtype: torch.dtype) -> None:
    """A change of any element changes the digest of samples at once, also of a large tensor."""
    tensor = torch.arange(size).remainder(100).to(dtype)
    for place in (0, 5, size // 2, size - 1):
        changed = tensor.clone()
        changed[place] += 1
        assert digest_of_samples([tensor], 4096, 0) != digest_of_samples([changed], 4096, 0)
    assert digest_of_samples([tensor], 4096, 0) == digest_of_samples([tensor.clone()], 4096, 0)


def test_another_order_shows_within_some_turns() -> None:
    """A swap of two rows of a large tensor changes the digest of samples within 40 turns."""
    rows = torch.randn(1 << 10, 32, generator=torch.Generator().manual_seed(0))
    changed = rows.clone()
    changed[[3, 700]] = rows[[700, 3]]
    pairs = ((digest_of_samples([x], 4096, turn) for x in (rows, changed)) for turn in range(40))
    assert any(one != other for one, other in pairs)
