"""The oracle's own parts: addends that reduce to what they stand for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoshard.ir.reduction import combine
from autoshard.ir.spec import Reduction
from autoshard.testing.run_strategy import addends

_INTEGERS = [torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64]


@pytest.mark.parametrize("reduction", list(Reduction), ids=str)
@pytest.mark.parametrize("dtype", [*_INTEGERS, torch.float32, torch.float64], ids=str)
@given(seed=st.integers(0, 9), count=st.integers(1, 4))
def test_addends_reduce_to_the_tensor(reduction: Reduction, dtype: torch.dtype, seed: int, count: int) -> None:
    """Also where they are few bits wide: nothing that is above wraps round to below."""
    torch.manual_seed(seed)
    x = torch.randint(0, 2, (3, 5)) * torch.randint(0, 120, (3, 5))
    x = x.to(dtype)
    found = addends(x, reduction, count)
    assert len(found) == count
    assert all(addend.dtype == dtype for addend in found)
    torch.testing.assert_close(combine(reduction, found), x)


def test_addends_differ_from_the_tensor() -> None:
    """So that an operator through which they do not pass is found."""
    x = torch.randn(64)
    for reduction in Reduction:
        for addend in addends(x, reduction, 2):
            assert not torch.equal(addend, x)
