"""Adam of many parameters in one launch against torch's, parameter by parameter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autoshard.errors import KernelError
from autoshard.kernels.optimizers import adam_
from autoshard.kernels.triton_adam import adam_updates_
from tests.kernels.fused import DEVICE, dtypes

shapes = st.lists(
    st.one_of(
        st.just((0,)), st.just(()), st.tuples(st.integers(1, 9)), st.tuples(st.integers(1, 40), st.integers(1, 60))
    ),
    min_size=1,
    max_size=6,
)
Group = list[Tensor]


def _hyper(step: float) -> Tensor:
    """lr, beta1, beta2, eps, weight decay, steps."""
    return torch.tensor([1e-2, 0.9, 0.99, 1e-8, 0.1, step], dtype=torch.float64)


def _draw(shapes: list[tuple[int, ...]], param: torch.dtype, grad: torch.dtype, state: torch.dtype) -> list[Group]:
    """Parameters, gradients and both moments."""

    def draw(dtype: torch.dtype) -> Group:
        return [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes]

    return [draw(param), draw(grad), draw(state), [x.abs() for x in draw(state)]]


def _expected(groups: list[Group], *rest: object) -> list[Group]:
    """By torch, in float64: parameters and both moments."""
    wide = [[x.double() for x in group] for group in groups]
    adam_(*wide, *rest)  # type: ignore[arg-type]
    return [wide[0], wide[2], wide[3]]


def _check(actual: list[Group], expected: list[Group]) -> None:
    for group, wanted in zip((actual[0], actual[2], actual[3]), expected, strict=True):
        for one, other in zip(group, wanted, strict=True):
            eps = torch.finfo(one.dtype).eps
            torch.testing.assert_close(one.double(), other, rtol=2 * eps, atol=max(2 * eps, 1e-6))


@settings(max_examples=15)
@given(shapes, dtypes, dtypes, st.booleans(), st.booleans(), st.booleans(), st.sampled_from([0.0, 7.0]))
def test_equals_torch(
    shapes: list[tuple[int, ...]], param: torch.dtype, rest: torch.dtype, decoupled: bool, maximize: bool, scaled: bool,
    step: float,
) -> None:  # fmt: skip
    """Adam and AdamW at odd and empty sizes, several blocks, mixed dtypes, with and without clipping."""
    torch.manual_seed(0)
    groups = _draw(shapes, param, rest, param)
    scale = torch.tensor(0.5, device=DEVICE) if scaled else None
    gradients = [x.clone() for x in groups[1]]
    arguments = (scale, _hyper(step), decoupled, maximize)
    expected = _expected(groups, *arguments)
    adam_updates_(*groups, *arguments)
    _check(groups, expected)
    assert all(torch.equal(*pair) for pair in zip(groups[1], gradients, strict=True))


def test_tensors_in_another_order() -> None:
    """A tensor that is not row-major is updated in place, and no memory beside it."""
    torch.manual_seed(0)
    (whole,), grads, (first,), (second,) = _draw([(6, 8)], *[torch.float32] * 3)
    before = whole.clone()
    groups = [[whole[:, 2:5]], [grads[0][:, 2:5]], [first.t()[2:5].t()], [second[:, 2:5]]]
    expected = _expected(groups, None, _hyper(3.0), True, False)
    adam_updates_(*groups, None, _hyper(3.0), True, False)
    _check(groups, expected)
    assert torch.equal(whole[:, :2], before[:, :2])
    assert torch.equal(whole[:, 5:], before[:, 5:])


def test_what_does_not_fit_is_refused() -> None:
    """Unlike dtypes and shapes are refused with the reason."""
    groups = _draw([(3,), (4,)], *[torch.float32] * 3)
    rest = (None, _hyper(0.0), True, False)
    with pytest.raises(KernelError, match="equally many grads and params, of one dtype"):
        adam_updates_(groups[0], [groups[1][0], groups[1][1].double()], *groups[2:], *rest)
    with pytest.raises(KernelError, match="moments of one dtype"):
        adam_updates_(*groups[:3], [x.half() for x in groups[3]], *rest)
    with pytest.raises(KernelError, match="other shapes"):
        adam_updates_(groups[0], groups[1][::-1], *groups[2:], *rest)
