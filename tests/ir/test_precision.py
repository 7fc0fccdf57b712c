"""Which models a precision narrows, and which names are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autoshard.errors import NotAvailableError
from autoshard.ir.precision import cast, effective_precision, widen


@pytest.mark.parametrize(
    ("dtype", "precision", "found"),
    [
        (torch.float32, "bf16", "bf16"),
        (torch.float32, "f16", "f16"),
        (torch.float32, "f32", None),
        (torch.float32, None, None),
        (torch.float64, "f32", "f32"),
        (torch.float64, "bf16", "bf16"),
        (torch.bfloat16, "bf16", None),
        (torch.float16, "f16", None),
    ],
)
def test_only_wider_parameters_are_narrowed(dtype: torch.dtype, precision: str | None, found: str | None) -> None:
    """The precision applies if the parameters have another type, and is None if they have its type already."""
    assert effective_precision(nn.Linear(2, 2, dtype=dtype), precision) == found


def test_a_model_without_parameters_has_nothing_to_narrow() -> None:
    """A model without parameters, or with integer parameters alone, has no precision."""
    assert effective_precision(nn.ReLU(), "bf16") is None
    counter = nn.Module()
    counter.count = nn.Parameter(torch.arange(3), requires_grad=False)
    assert effective_precision(counter, "bf16") is None


def test_an_unknown_precision() -> None:
    with pytest.raises(NotAvailableError, match=r"precision='int8' is unknown; use 'bf16', 'f16', 'f32', or None"):
        effective_precision(nn.Linear(2, 2), "int8")


@pytest.mark.parametrize(("dtype", "precision"), [(torch.bfloat16, "f32"), (torch.float16, "bf16")])
def test_parameters_are_never_widened(dtype: torch.dtype, precision: str) -> None:
    """A precision to which the parameters cannot be narrowed is refused: f32 for bfloat16, and bf16 for float16."""
    with pytest.raises(NotAvailableError, match=rf"this model's are {dtype}. Convert it with model.to\(torch\.\w+\)"):
        effective_precision(nn.Linear(2, 2, dtype=dtype), precision)


def test_casts_leave_the_rest_alone() -> None:
    """`cast` to bfloat16 returns integer, complex, float16 and bool tensors as they are. `widen` makes float16
    float32, and returns integer, complex and float64 tensors as they are."""
    kept = [torch.ones(2, dtype=dtype) for dtype in (torch.int64, torch.complex64, torch.float16, torch.bool)]
    assert all(cast(item, torch.bfloat16) is item for item in kept)
    assert all(widen(item) is item for item in (*kept[:2], torch.ones(2, dtype=torch.float64)))
    assert widen(kept[2]).dtype is torch.float32


@pytest.mark.parametrize(
    ("given", "meant"), [("fp16", "f16"), (torch.bfloat16, "bf16"), ("BF16", "bf16"), ("float32", "f32")]
)
def test_a_precision_of_another_spelling_is_named(given: object, meant: str) -> None:
    """A precision in another spelling is refused, and the error suggests autoshard's name."""
    with pytest.raises(NotAvailableError, match=f"Did you mean '{meant}'"):
        effective_precision(torch.nn.Linear(2, 2), given)  # type: ignore[arg-type]
