"""Attention within packed sequences, and its gradients, against each sequence alone in float64."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from autoshard.kernels.packed_attention import packed_attention
from tests.kernels.fused import DEVICE, draw

lengths = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=4).filter(
    lambda pairs: all(sum(side) for side in zip(*pairs, strict=True))
)


def _starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=DEVICE)


def _alone(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, window: int) -> Tensor:
    """Attention of one sequence [s, H, D], written out: the last query is beside the last key."""
    queries, keys, group = len(q), len(k), q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    place = torch.arange(keys - queries, keys, device=q.device)[:, None]
    column = torch.arange(keys, device=q.device)
    seen = torch.ones(queries, keys, dtype=torch.bool, device=q.device)
    if is_causal:
        seen &= column <= place
    if window:
        seen &= place - column < window
    scores = (torch.einsum("shd,thd->hst", q, k) * q.shape[2] ** -0.5).masked_fill(~seen, -1e30)
    weights = torch.where(seen, scores.softmax(-1), 0.0)
    return torch.einsum("hst,thd->shd", weights, v)


def _expected(
    operands: tuple[Tensor, ...], grad_out: Tensor, lengths: list[tuple[int, int]], is_causal: bool, window: int
) -> list[Tensor]:
    """Output and gradients in float64, sequence by sequence."""
    q, k, v = (x.double().requires_grad_() for x in operands)
    rows, columns = ([length[side] for length in lengths] for side in (0, 1))
    pieces = zip(q.split(rows), k.split(columns), v.split(columns), strict=True)
    out = torch.cat([_alone(*piece, is_causal, window) for piece in pieces])
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad_out.double())]


@given(lengths, st.booleans(), st.sampled_from([0, 3]))
def test_equals_each_sequence_alone(lengths: list[tuple[int, int]], is_causal: bool, window: int) -> None:
    """Output and gradients for drawn lengths, some of them 0; grouped heads, causal, windows."""
    torch.manual_seed(0)
    rows, columns = ([length[side] for length in lengths] for side in (0, 1))
    operands = [
        torch.randn(sum(rows), 2, 3, dtype=torch.float64, device=DEVICE, requires_grad=True),
        *(torch.randn(sum(columns), 1, 3, dtype=torch.float64, device=DEVICE, requires_grad=True) for _ in range(2)),
    ]
    out, _ = packed_attention(*operands, _starts(rows), _starts(columns), is_causal, window, 3**-0.5)
    grad_out = torch.randn_like(out)
    found = [out.detach(), *torch.autograd.grad(out, operands, grad_out)]
    expected = _expected(tuple(x.detach() for x in operands), grad_out, lengths, is_causal, window)
    torch.testing.assert_close(found, expected)


def test_what_does_not_fit_is_refused() -> None:
    """Inconsistent starts, and shapes that do not fit, are refused with the reason."""
    q, starts = draw(4, 2, 8), _starts([1, 3])
    with pytest.raises(ValueError, match="equally many starts"):
        packed_attention(q, q, q, starts, starts[:2], True, 0, 1.0)
    with pytest.raises(ValueError, match="in int32"):
        packed_attention(q, q, q, starts.long(), starts.long(), True, 0, 1.0)
    with pytest.raises(ValueError, match="multiple of its key heads"):
        packed_attention(q[:, :1], q, q, starts, starts, True, 0, 1.0)
    with pytest.raises(ValueError, match=r"takes q \[S, H, D\]"):
        packed_attention(q[0], q, q, starts, starts, True, 0, 1.0)
