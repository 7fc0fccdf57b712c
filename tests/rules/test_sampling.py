"""`agree` accepts differences by rounding, and no wrong number."""

from __future__ import annotations

import math

import pytest
import torch

from autoshard.rules.sampling import agree


@pytest.mark.parametrize(
    ("dtype", "passes", "fails"),
    [(torch.float64, 5e-8, 3e-7), (torch.float32, 5e-4, 3e-3), (torch.complex128, 5e-8, 3e-7)],
)
def test_each_element_may_be_off_by_little(dtype: torch.dtype, passes: float, fails: float) -> None:
    """An element may differ by a small relative error, and not by six times this error."""
    expected = torch.tensor([1.0, -2.0, 3.0], dtype=dtype)
    assert agree(expected * (1 + passes), expected)
    for place in range(3):
        found = expected.clone()
        found[place] *= 1 + fails
        assert not agree(found, expected)


@pytest.mark.parametrize(("dtype", "passes", "fails"), [(torch.float64, 5e-12, 1e-10), (torch.float32, 5e-6, 1e-4)])
def test_small_elements_may_be_off_by_what_the_largest_rounds_to(
    dtype: torch.dtype, passes: float, fails: float
) -> None:
    """A small element may differ by the rounding error of the largest element, at any scale."""
    for scale in (1e-6, 1.0, 1e6):
        expected = torch.tensor([scale, 0.0], dtype=dtype)
        assert agree(expected + torch.tensor([0.0, passes * scale], dtype=dtype), expected)
        assert not agree(expected + torch.tensor([0.0, fails * scale], dtype=dtype), expected)


def test_infinities_do_not_hide_what_is_finite() -> None:
    """Infinities and NaN must agree in place, and do not count as the largest element."""
    expected = torch.tensor([math.inf, math.nan, 1.0, 0.0])
    assert agree(expected.clone(), expected)
    for place, value in ((0, -math.inf), (0, 1.0), (1, 1.0), (2, math.nan), (3, 0.01)):
        found = expected.clone()
        found[place] = value
        assert not agree(found, expected), (place, value)


def test_integers_shapes_and_types_are_exact() -> None:
    counts = torch.arange(4)
    assert agree(counts.clone(), counts)
    assert not agree(counts + torch.tensor([0, 0, 0, 1]), counts)
    assert not agree(counts.view(2, 2), counts)
    assert not agree(counts.int(), counts)
