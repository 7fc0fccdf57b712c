"""Comparison of a mesh's values with one device's, with infinities and complex numbers."""

from __future__ import annotations

import math

import pytest
import torch

from autoshard.testing.report import TOLERANCE, compare

ONE = torch.tensor([1.0, -math.inf, math.inf])


def test_equal_infinities_do_not_differ() -> None:
    """Equal infinities do not differ, and the scale is the largest finite element."""
    found = compare("output:0", ONE, ONE.clone())
    assert (found.difference, found.scale) == (0.0, 1.0)


@pytest.mark.parametrize("other", [[2.0, -math.inf, math.inf], [1.0, math.inf, math.inf], [1.0, -math.inf, 5.0]])
def test_an_infinity_hides_no_difference(other: list[float]) -> None:
    """A difference beside infinities, an infinity of another sign, and a finite number in place of an infinity are
    found."""
    assert not compare("output:0", torch.tensor(other), ONE).is_close(TOLERANCE)


def test_imaginary_parts_are_compared() -> None:
    """Complex numbers that differ only in the imaginary part differ."""
    found = compare("output:0", torch.tensor([3.0 + 2.0j]), torch.tensor([3.0 + 4.0j]))
    assert (found.difference, found.scale) == (2.0, 5.0)
