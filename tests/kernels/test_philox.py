"""Philox gives the published test vectors, and shards draw the same numbers as the whole array."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoshard.kernels.philox import drop_threshold, keep_mask, philox_4x32, random_words

# Random123 1.14, tests/kat_vectors, lines "philox4x32 10": counter, key, result.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@st.composite
def shards(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """(shape, offset, global_shape) of a shard that lies inside its array."""
    whole = draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    offset = [draw(st.integers(0, size)) for size in whole]
    shape = [draw(st.integers(0, size - start)) for size, start in zip(whole, offset, strict=True)]
    return shape, offset, whole


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """The generator gives Random123's published vectors."""
    words = philox_4x32(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
    assert tuple(int(word) for word in words) == expected


@given(shards(), st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**32 - 1))
def test_shard_equals_slice_of_whole(shard: tuple[list[int], list[int], list[int]], seed: int, site: int) -> None:
    """A shard's numbers are the slice of the whole array's, bit for bit."""
    shape, offset, whole = shard
    key = torch.tensor(seed)
    full = random_words(whole, [0] * len(whole), whole, key, site)
    index = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
    assert torch.equal(full[index], random_words(shape, offset, whole, key, site))


def test_padding_beyond_the_global_shape_is_allowed() -> None:
    """A shard padded beyond the global shape draws the same numbers in its real rows."""
    seed = torch.tensor(5)
    padded = random_words((3, 4), (2, 0), (4, 4), seed, 1)
    assert torch.equal(padded[:2], random_words((4, 4), (0, 0), (4, 4), seed, 1)[2:])


def test_index_above_32_bits_uses_the_high_word() -> None:
    """An element whose index exceeds 32 bits uses the counter's high word, and draws another word than the element
    2^32 before."""
    seed, whole = torch.tensor(1), (2**33,)
    far = random_words((1,), (2**32 + 3,), whole, seed, 9)
    three, one, zero = torch.tensor(3), torch.tensor(1), torch.tensor(0)
    assert int(far) == int(philox_4x32((three, one, torch.tensor(9), zero), (one, zero))[0])
    assert int(far) != int(random_words((1,), (3,), whole, seed, 9))


def test_sites_and_seeds_draw_different_numbers() -> None:
    """Draws with different sites or seeds differ."""
    draws = [
        random_words((64,), (0,), (64,), torch.tensor(seed), site)
        for seed, site in [(0, 0), (0, 1), (1, 0), (2**32, 0)]
    ]
    assert len({tuple(draw.tolist()) for draw in draws}) == len(draws)


def test_words_have_the_right_moments() -> None:
    """Words divided by 2^32 have mean 1/2 and variance 1/12, within five standard errors."""
    x = random_words((20_000,), (0,), (20_000,), torch.tensor(3), 4).double() * 2.0**-32
    assert abs(float(x.mean()) - 0.5) < 5 * (1 / 12 / 20_000) ** 0.5
    assert abs(float(x.var()) - 1 / 12) < 5 * (1 / 180 / 20_000) ** 0.5


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_keep_mask_keeps_the_share_it_should(p: float) -> None:
    """`keep_mask` keeps a share 1 - p of the elements: all for p = 0, none for p = 1."""
    keep = keep_mask((20_000,), (0,), (20_000,), torch.tensor(3), 4, p).double().mean()
    assert abs(float(keep) - (1 - p)) <= 5 * (p * (1 - p) / 20_000) ** 0.5


def test_shapes_of_different_rank_are_refused() -> None:
    """An offset with fewer entries than the shape is refused."""
    with pytest.raises(ValueError, match=r"shape=\(2, 2\), offset=\(0,\)"):
        random_words((2, 2), (0,), (2, 2), torch.tensor(0), 0)


def test_a_probability_outside_zero_to_one_is_refused() -> None:
    """A probability of 1.5 is refused."""
    with pytest.raises(ValueError, match=r"p=1\.5 must lie between 0 and 1"):
        drop_threshold(1.5)
