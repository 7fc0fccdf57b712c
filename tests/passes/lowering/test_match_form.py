"""Forms are traced into patterns, and found by the operator of their first result."""

from __future__ import annotations

import pytest
import torch

from autoshard.kernels.registry import FUSED
from passes.lowering.match_form import root_operator, trace_form


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_forms_first_operator_depends_on_the_dtype_alone(dtype: torch.dtype) -> None:
    """The operator of a form's first result is the same for operands of any number of dims."""
    sizes = [1, 6, 2048, 5]
    for form in (form for kernel in FUSED for form in kernel.forms):
        for dims in [form.dims] if form.dims else [1, 2, 3, 4]:
            like = torch.empty(sizes[-dims:], dtype=dtype, device="meta")
            assert trace_form(form, like).root.target is root_operator(form, dtype)
