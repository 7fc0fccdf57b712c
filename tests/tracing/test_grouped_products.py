"""Grouped products on fake tensors have the shapes, strides and types of torch's results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

import autoshard.tracing  # noqa: F401  (registers the kernel)

_ENDS = torch.tensor([4, 8, 8, 16], dtype=torch.int32)


def _fake(*operands: Tensor, **options: Any) -> Tensor:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(x) for x in operands]
    with mode:
        return F.grouped_mm(*fakes, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("left", "right", "ends"),
    [
        (torch.ones(16, 16), torch.ones(4, 16, 8), _ENDS),
        (torch.ones(16, 16), torch.ones(4, 5, 16).mT, _ENDS),
        (torch.ones(16, 16).mT, torch.ones(16, 8), _ENDS),
        (torch.ones(4, 8, 8), torch.ones(8, 16), _ENDS),
        (torch.ones(4, 8, 8), torch.ones(4, 5, 8).mT, None),
    ],
    ids=["rows by matrices", "columns lie together", "gradient of matrices", "columns", "batches"],
)
def test_forms(left: Tensor, right: Tensor, ends: Tensor | None, dtype: torch.dtype) -> None:
    """Shape, strides and type of the fake result equal those of torch's product."""
    left, right = left.to(dtype), right.to(dtype)
    expected, found = F.grouped_mm(left, right, offs=ends), _fake(left, right, offs=ends)
    assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), dtype)


@pytest.mark.parametrize(
    ("left", "right", "options", "message"),
    [
        (torch.ones(16, 16).double(), torch.ones(4, 16, 8).double(), {}, "torch.float64"),
        (torch.ones(16, 16), torch.ones(4, 16, 8).half(), {}, "make both one type"),
        (torch.ones(16, 16), torch.ones(4, 16, 8), {"out_dtype": torch.bfloat16}, "out_dtype=torch.bfloat16"),
        (torch.ones(16, 16), torch.ones(4, 16, 8), {"bias": torch.ones(4, 8)}, "bias"),
        (torch.ones(16, 16), torch.ones(4, 16, 8), {"offs": None}, "offs is given"),
        (torch.ones(16, 16), torch.ones(4, 16, 8), {"offs": _ENDS.long()}, "int32"),
        (torch.ones(16, 16), torch.ones(4, 8, 8), {}, "inner sizes"),
        (torch.ones(16, 16), torch.ones(3, 16, 8), {}, "groups"),
        (torch.ones(16, 6), torch.ones(4, 6, 8), {}, "16 bytes"),
    ],
)
def test_operands_that_torch_does_not_take(left: Tensor, right: Tensor, options: dict[str, Any], message: str) -> None:
    """Fake tensors refuse the operands that torch's product refuses on the CPU."""
    options = {"offs": _ENDS, **options}
    with pytest.raises((RuntimeError, ValueError)):
        F.grouped_mm(left, right, **options)
    with pytest.raises(RuntimeError, match=message):
        _fake(left, right, **options)
