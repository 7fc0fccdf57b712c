"""Values of a mesh are compared with those of one device: infinities and complex numbers too."""

from __future__ import annotations

import math

import pytest
import torch

from autoshard.testing.report import TOLERANCE, compare

ONE = torch.tensor([1.0, -math.inf, math.inf])


def test_equal_infinities_do_not_differ() -> None:
    """Masked logits are -inf on the mesh and on one device; the scale is that of finite elements."""
    found = compare("output:0", ONE, ONE.clone())
    assert (found.difference, found.scale) == (0.0, 1.0)


@pytest.mark.parametrize("other", [[2.0, -math.inf, math.inf], [1.0, math.inf, math.inf], [1.0, -math.inf, 5.0]])
def test_an_infinity_hides_no_difference(other: list[float]) -> None:
    """Another finite element, another sign and a finite number in an infinity's place are differences."""
    assert not compare("output:0", torch.tensor(other), ONE).is_close(TOLERANCE)


def test_imaginary_parts_are_compared() -> None:
    """Complex numbers with equal real parts and other imaginary parts differ."""
    found = compare("output:0", torch.tensor([3.0 + 2.0j]), torch.tensor([3.0 + 4.0j]))
    assert (found.difference, found.scale) == (2.0, 5.0)
