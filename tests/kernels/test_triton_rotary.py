"""The kernel of the rotary embedding equals its forms in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from autoshard.errors import KernelError
from autoshard.kernels.triton_rotary import FUSED, rotary
from tests.kernels.fused import DEVICE, assert_results, draw, dtypes, expected_of, wide

pytestmark = pytest.mark.usefixtures("_poisoned_outputs")
BACKWARD, FORWARD = FUSED[0].forms


def _angles(batch: int, start: int, length: int, size: int, *, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Cosines and sines [batch, 1, length, size] of the positions from `start` on."""
    frequency = 100.0 ** (-torch.arange(size // 2, device=DEVICE) / (size // 2))
    position = torch.arange(start, start + length, device=DEVICE) + torch.arange(batch, device=DEVICE)[:, None]
    angle = position[:, None, :, None] * frequency
    angle = angle.repeat_interleave(2, -1) if interleaved else torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


@given(
    st.integers(1, 2), st.integers(1, 3), st.integers(1, 2), st.integers(1, 70), st.integers(1, 9), dtypes,
    st.booleans(), st.integers(0, 50),
)  # fmt: skip
def test_rotary(
    batch: int, heads: int, groups: int, length: int, half: int, dtype: torch.dtype, per_batch: bool, start: int
) -> None:
    """Rotated queries and keys equal the form's, forward and backward, from any position, with shared angles or with
    angles of each batch row."""
    size = 2 * half
    q, k = draw(batch, heads, length, size, dtype=dtype), draw(batch, groups, length, size, dtype=dtype)
    cos, sin = (x.to(dtype) for x in _angles(batch if per_batch else 1, start, length, size))
    arguments = {"q": q, "k": k, "cos": cos, "sin": sin}
    for form in (FORWARD, BACKWARD):
        assert_results(rotary(**arguments, **form.constants(q)), expected_of(form, q, **arguments), dtype)


def test_interleaved_pairs() -> None:
    """Interleaved pairs equal complex numbers multiplied by the angle's unit number, and the inverse
    restores q and k."""
    q, k = draw(2, 3, 5, 8), draw(2, 1, 5, 8)
    cos, sin = _angles(1, 3, 5, 8, interleaved=True)
    turned = rotary(q, k, cos, sin, True, False)
    factor = torch.complex(wide(cos)[..., ::2].contiguous(), wide(sin)[..., ::2].contiguous())
    expected = tuple(
        torch.view_as_real(torch.view_as_complex(wide(x).unflatten(-1, (-1, 2))) * factor).flatten(-2) for x in (q, k)
    )
    assert_results(turned, expected, torch.float32)
    assert_results(rotary(*turned, cos, sin, True, True), (wide(q), wide(k)), torch.float32)


def test_strided_inputs() -> None:
    """Queries and keys that are transposed views have the form's results."""
    q, k = draw(2, 5, 3, 6).transpose(1, 2), draw(2, 6, 2, 5).permute(0, 2, 3, 1)
    cos, sin = _angles(1, 0, 5, 6)
    arguments = {"q": q, "k": k, "cos": cos, "sin": sin}
    assert_results(rotary(**arguments, **FORWARD.constants(q)), expected_of(FORWARD, q, **arguments), q.dtype)


def test_what_does_not_fit_is_refused() -> None:
    """Odd heads, and angles of another length, are refused with the reason."""
    q = draw(1, 1, 2, 3)
    with pytest.raises(KernelError, match="heads have 3 elements"):
        rotary(q, q, q, q, False, False)
    with pytest.raises(KernelError, match="do not fit each other"):
        rotary(q, q, q[:, :, :1], q[:, :, :1], False, False)
