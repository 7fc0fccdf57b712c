"""Tokens to experts and back: the kernels against their forms in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autoshard.errors import KernelError
from autoshard.kernels.kernel import Form
from autoshard.kernels.triton_permutation import FUSED, combine, combine_backward, permute, permute_backward
from tests.kernels.fused import DEVICE, assert_results, draw, dtypes, wide

pytestmark = pytest.mark.usefixtures("_poisoned_outputs")
COMBINE_BACKWARD, COMBINE, PERMUTE_BACKWARD, PERMUTE = FUSED


def _wide_results(form: Form, like: Tensor, **arguments: Any) -> tuple[Any, ...]:
    """The results of a form in float64; `like` stands for the first one, in whose type it sums."""
    variables = {name: wide(value) for name, value in arguments.items()}
    return form.results(like.double(), variables | {"tokens": len(arguments.get("grad", ()))})


def _check(x: Tensor, y: Tensor, shares: Tensor, order: Tensor) -> None:
    """All four kernels, for x and gradients [T, H], and y [T k, H]."""
    count, inverse, dtype = len(y) // len(x), order.argsort(), x.dtype
    assert torch.equal(permute(x, order, count), x[order // count])
    back = permute_backward(y, order, count, **PERMUTE_BACKWARD.forms[0].constants(x))
    assert_results(back, _wide_results(PERMUTE_BACKWARD.forms[0], x, grad=y, order=order, count=count), dtype, count)
    arguments = {"y": y, "shares": shares, "inverse": inverse, "count": count}
    assert_results(combine(**arguments), _wide_results(COMBINE.forms[1], x, **arguments), dtype, count)
    wanted = _wide_results(COMBINE_BACKWARD.forms[1], y, grad=x, **arguments)
    y_grad, shares_grad = combine_backward(x, **arguments)
    assert_results(y_grad, wanted[:1], dtype)
    assert_results(shares_grad, wanted[1:], shares.dtype, scale=x.shape[1])


@settings(max_examples=12)
@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 37), dtypes, st.booleans())
def test_tokens_to_experts_and_back(tokens: int, count: int, columns: int, dtype: torch.dtype, is_wide: bool) -> None:
    """Any number of tokens and experts of each; shares in the tokens' type or in float32."""
    order = torch.randperm(tokens * count, device=DEVICE)
    shares = draw(tokens * count, dtype=torch.float32 if is_wide else dtype)
    _check(draw(tokens, columns, dtype=dtype), draw(tokens * count, columns, dtype=dtype), shares, order)


def test_strided_rows_in_several_blocks() -> None:
    """Rows with gaps, longer than a block."""
    x, y = draw(3, 1300)[:, 20:1220], draw(1200, 6).t()
    _check(x, y, draw(6), torch.randperm(6, device=DEVICE))


def test_places_that_are_taken_twice_or_never() -> None:
    """Indices that are no permutation add up all the same, and rows without any are 0."""
    grad, y, shares = draw(2, 5), draw(4, 5), draw(4)
    inverse = torch.tensor([1, 1, 3, 1], device=DEVICE)
    placed = torch.zeros(4, 5, device=DEVICE).index_add(0, inverse, grad.repeat_interleave(2, 0))
    y_grad, shares_grad = combine_backward(grad, y, shares, inverse, 2)
    torch.testing.assert_close(y_grad, placed * shares[:, None])
    torch.testing.assert_close(shares_grad, (placed * y).sum(1, keepdim=True))


def test_places_that_there_are_not_give_nan() -> None:
    """Nothing is read beside the rows, and nothing is silently made up."""
    order = torch.tensor([-1, 0, 3, 8], device=DEVICE)
    assert permute(draw(2, 3), order, 2).isnan().all(1).tolist() == [True, False, False, True]
    assert combine(draw(4, 3), draw(4), order, 2).isnan().all(1).tolist() == [True, True]


def test_what_does_not_fit_is_refused() -> None:
    """Indices of another number or type, and gradients of other tokens, are refused with the reason."""
    order = torch.arange(4, device=DEVICE)
    with pytest.raises(KernelError, match=r"x \[T, H\] and order \[T k\]"):
        permute(draw(3, 5), order, 2)
    with pytest.raises(KernelError, match="indices in int64"):
        combine(draw(4, 5), draw(4), order.int(), 2)
    with pytest.raises(KernelError, match=r"grad \[T, H\] for y \[T k, H\]"):
        combine_backward(draw(4, 5), draw(4, 5), draw(4), order, 2)
