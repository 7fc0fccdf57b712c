"""Reductions, and the identity of each."""

import pytest
import torch

from autoshard.ir.reduction import combine, identity_of
from autoshard.ir.spec import Reduction

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool)


@pytest.mark.parametrize("reduction", list(Reduction))
@pytest.mark.parametrize("dtype", DTYPES)
def test_identity_changes_no_bit(reduction: Reduction, dtype: torch.dtype) -> None:
    """Combining a value with the identity, on either side, returns the value bit for bit."""
    value = torch.tensor([0.0, -0.0, 1.0, -3.5, float("inf"), -float("inf")])
    value = value.to(dtype) if dtype.is_floating_point else torch.tensor([0, 1, 100]).to(dtype)
    other = torch.full_like(value, identity_of(reduction, dtype))
    bits = value.view(torch.uint8)
    assert torch.equal(combine(reduction, [value, other]).view(torch.uint8), bits)
    assert torch.equal(combine(reduction, [other, value]).view(torch.uint8), bits)


def test_float8_without_infinity() -> None:
    """The identity of the minimum of a float8 type without infinity is its largest number, 448."""
    assert identity_of(Reduction.MIN, torch.float8_e4m3fn) == 448.0


def test_bool_reductions_are_or_and_and() -> None:
    """The sum of bools is `or`, and the product is `and`."""
    addends = [torch.tensor([False, False, True]), torch.tensor([False, True, True])]
    assert combine(Reduction.SUM, addends).tolist() == [False, True, True]
    assert combine(Reduction.PRODUCT, addends).tolist() == [False, False, True]
