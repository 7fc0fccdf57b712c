"""Shared parts of tests of fused kernels: a form is run in float64, and a kernel's results are compared with the
form's."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from autoshard.kernels.kernel import Form

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normally distributed numbers."""
    return torch.randn(shape, device=DEVICE).to(dtype)


def wide(value: Any) -> Any:
    """Tensors in float64; other values unchanged."""
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def expected_of(form: Form, like: Tensor, **arguments: Any) -> tuple[Any, ...]:
    """The results of a form, run in float64 on the kernel's own arguments."""
    variables = {name: wide(value) for name, value in arguments.items()}
    variables |= {name: compute(arguments) for name, compute in form.derived_variables.items()}
    return form.results(like.to(torch.float32), variables)


def assert_results(actual: Any, expected: tuple[Any, ...], dtype: torch.dtype, scale: float = 1.0) -> None:
    """Each result has the expected shape and dtype, and differs from the expected result by a few roundings of
    `dtype`."""
    results = actual if isinstance(actual, tuple) else (actual,)
    eps = torch.finfo(dtype).eps * scale
    for index, (result, wanted) in enumerate(zip(results, expected, strict=True)):
        if wanted is None:
            continue
        assert result.shape == wanted.shape
        assert result.dtype in ((dtype,) if index == 0 else (dtype, torch.float32))
        torch.testing.assert_close(result.double(), wanted, rtol=4 * eps, atol=max(8 * eps, 2e-5))
