"""The library's product with its bias against its form in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.kernels.biased_product import FUSED, biased_product, why_not_biased_product
from tests.kernels.fused import assert_results, draw, dtypes, expected_of

pytestmark = pytest.mark.usefixtures("_poisoned_outputs")
(KERNEL,) = FUSED


@settings(max_examples=10)
@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 9), dtypes)
def test_product_with_bias(rows: int, depth: int, columns: int, dtype: torch.dtype) -> None:
    """Odd sizes and turned operands."""
    arguments = {"a": draw(rows, depth, dtype=dtype), "b": draw(columns, depth, dtype=dtype).t()}
    arguments["bias"] = draw(columns, dtype=dtype)
    expected = expected_of(KERNEL.forms[0], arguments["a"], **arguments)
    assert_results(biased_product(**arguments), expected, dtype, scale=depth**0.5)


def test_what_is_no_bias_is_refused() -> None:
    """A residual, and a bias of another type, stay additions of their own."""
    a, b = draw(2, 3), draw(3, 4)
    assert "bias [N]" in str(why_not_biased_product(a, b, draw(2, 4)))
    assert "dtypes differ" in str(why_not_biased_product(a, b, draw(4, dtype=torch.float16)))
