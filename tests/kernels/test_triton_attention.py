"""The attention kernels against the reference in float64, gradients included."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autoshard.errors import KernelError
from autoshard.kernels.attention import attention_reference
from autoshard.kernels.registry import find_kernel
from autoshard.kernels.triton_attention import flash_attention, triton_attention
from autoshard.kernels.triton_attention_backward import (
    flash_attention_backward,
    queries_tile,
    triton_attention_backward,
)

pytestmark = pytest.mark.usefixtures("_poisoned_outputs")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def _draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def _expected(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, *, is_causal: bool, offsets: tuple[int, int]
) -> tuple[Tensor, ...]:
    """Output, log-sum-exp and gradients of the reference in float64."""
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    scale = q.shape[3] ** -0.5
    place = ([0, 0, *offsets], [*q.shape[:2], 99, 99])
    out, lse = attention_reference(wide[0], wide[1], wide[2], None, None, 0.0, is_causal, scale, 0, *place)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, wide, grad_out.double())


def _check(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, offsets: tuple[int, int] = (0, 0)) -> None:
    grad_out = _draw(*q.shape, dtype=q.dtype)
    options = {"is_causal": is_causal, "query_offset": offsets[0], "key_offset": offsets[1]}
    out, lse = flash_attention(q, k, v, q.shape[3] ** -0.5, **options)
    grads = flash_attention_backward(grad_out, q, k, v, out, lse, q.shape[3] ** -0.5, **options)
    expected = _expected(q, k, v, grad_out, is_causal=is_causal, offsets=offsets)
    assert [x.dtype for x in (out, lse, *grads)] == [q.dtype, torch.float32, q.dtype, q.dtype, q.dtype]
    for actual, wanted in zip((out, lse, *grads), expected, strict=True):
        # A row that sees nothing has no gradient; autograd of the reference says NaN there.
        wanted = torch.where(wanted.isnan(), 0.0, wanted)
        tolerance = TOLERANCE[q.dtype] * max(1.0, q.shape[1] / k.shape[1])
        torch.testing.assert_close(actual.double(), wanted, rtol=tolerance, atol=tolerance)


@settings(max_examples=12)
@given(
    st.integers(1, 2),
    st.integers(1, 2),
    st.integers(1, 3),
    st.integers(1, 75),
    st.integers(1, 75),
    st.integers(1, 33),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.booleans(),
    st.tuples(st.integers(0, 30), st.integers(0, 30)),
)
def test_attention(
    batch: int,
    groups: int,
    members: int,
    queries: int,
    keys: int,
    size: int,
    dtype: torch.dtype,
    is_causal: bool,
    offsets: tuple[int, int],
) -> None:
    """Output, log-sum-exp and gradients at odd sizes: grouped heads, causal, offsets of shards."""
    torch.manual_seed(0)
    q = _draw(batch, groups * members, queries, size, dtype=dtype)
    k, v = (_draw(batch, groups, keys, size, dtype=dtype) for _ in range(2))
    _check(q, k, v, is_causal=is_causal, offsets=offsets)


@pytest.mark.parametrize("size", [64, 128])
def test_usual_heads_in_several_blocks(size: int) -> None:
    """At the usual head sizes, where several blocks of keys are full and some at the edge."""
    torch.manual_seed(0)
    _check(*(_draw(1, 1, 200, size) for _ in range(3)), is_causal=True)


def test_strided_inputs() -> None:
    """Heads that lie between the elements of a sequence, as projections give them, are read right."""
    torch.manual_seed(0)
    q, k, v = (_draw(2, 9, 2, 6).transpose(1, 2) for _ in range(3))
    _check(q, k, v, is_causal=True)
    _check(*(x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)), is_causal=True)


@settings(max_examples=8)
@given(
    st.sets(st.integers(1, 39), max_size=3), st.sets(st.integers(1, 29), max_size=2), st.booleans(),
    st.integers(0, 12),
)  # fmt: skip
def test_shards_combine(key_cuts: set[int], query_cuts: set[int], is_causal: bool, query_offset: int) -> None:
    """Shards of queries are rows of the whole; the log-sum-exps of shards of keys combine their outputs, and their
    gradients add up to those of the whole."""
    torch.manual_seed(0)
    q, grad_out = (_draw(1, 2, 30, 4) for _ in range(2))
    k, v = (_draw(1, 1, 40, 4) for _ in range(2))
    options = {"is_causal": is_causal}
    whole, lse = flash_attention(q, k, v, 0.5, **options, query_offset=query_offset)
    expected = flash_attention_backward(grad_out, q, k, v, whole, lse, 0.5, **options, query_offset=query_offset)
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    for rows in _parts(query_cuts, 30):
        outs, norms = [], []
        here = (grad_out[:, :, rows], q[:, :, rows])
        for columns in _parts(key_cuts, 40):
            place = {"query_offset": query_offset + rows.start, "key_offset": columns.start}
            shard = (here[1], k[:, :, columns], v[:, :, columns])
            out, norm = flash_attention(*shard, 0.5, **options, **place)
            outs.append(out)
            norms.append(norm)
            total = (whole[:, :, rows], lse[:, :, rows])
            addends = flash_attention_backward(here[0], *shard, *total, 0.5, **options, **place)
            for grad, part, addend in zip(grads, (rows, columns, columns), addends, strict=True):
                grad[:, :, part] += addend
        combined = torch.logsumexp(torch.stack(norms), 0)
        # A row that sees no key of any shard has weight 0 everywhere.
        weights = [(norm - combined).exp().nan_to_num(0.0)[..., None] for norm in norms]
        torch.testing.assert_close(combined, lse[:, :, rows], rtol=1e-5, atol=1e-5)
        out = torch.stack([weight * out for weight, out in zip(weights, outs, strict=True)]).sum(0)
        torch.testing.assert_close(out, whole[:, :, rows], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grads, list(expected), rtol=1e-4, atol=1e-5)


def _parts(cuts: set[int], size: int) -> list[slice]:
    """The ranges between the cuts."""
    ends = [0, *sorted(cuts), size]
    return [slice(start, stop) for start, stop in pairwise(ends)]


@pytest.mark.parametrize(
    ("dtype", "head", "is_causal", "shift", "is_ours"),
    [
        (torch.bfloat16, 64, True, 0, False),
        (torch.float16, 64, False, 8, False),
        (torch.float32, 64, True, 0, True),
        (torch.bfloat16, 20, True, 0, True),
        (torch.bfloat16, 64, True, 8, True),
    ],
)
def test_attention_is_left_to_torch_where_one_fused_call_takes_it(
    dtype: torch.dtype, head: int, is_causal: bool, shift: int, is_ours: bool
) -> None:
    """Forward and backward alike; our kernels stand in for calls of 32 bits, odd heads and causal shards."""
    q, lse = torch.empty(1, 2, 16, head, dtype=dtype, device="meta"), torch.empty(1, 2, 16, device="meta")
    rest = (None, 0.0, is_causal, 1.0, 0, [0, 0, shift, 0], [1, 2, 16 + shift, 16 + shift])
    forward = find_kernel(torch.ops.autoshard.attention.default, (q, q, q, None, *rest))
    backward = find_kernel(torch.ops.autoshard.attention_backward.default, (q, q, q, q, None, q, lse, *rest))
    assert (forward is not None, backward is not None) == (is_ours, is_ours)


def test_masks_and_dropout_are_refused() -> None:
    """A call that the kernel does not support is refused with the reason, forward and backward."""
    q = _draw(1, 1, 2, 4)
    mask, lse = torch.ones(2, 2, dtype=torch.bool, device=DEVICE), _draw(1, 1, 2)
    rest = (False, 1.0, 0, [0, 0, 0, 0], [1, 1, 2, 2])
    with pytest.raises(KernelError, match="found a mask"):
        triton_attention(q, q, q, mask, None, 0.0, *rest)
    with pytest.raises(KernelError, match="has no dropout"):
        triton_attention_backward(q, q, q, q, None, q, lse, None, 0.5, *rest)
    with pytest.raises(KernelError, match="one size"):
        flash_attention(q, q, q[..., :2], 1.0)


@pytest.mark.parametrize(("size", "warps"), [(128, 4), (256, 8)])
def test_a_wavefront_has_the_registers_of_two_warps(size: int, warps: int) -> None:
    """An MI300 runs heads of 128 with half the warps of an H100; neither has registers for more of longer ones."""
    assert queries_tile(size, torch.bfloat16, "gfx942").num_warps == warps
    assert queries_tile(size, torch.bfloat16, "sm_90").num_warps == 8
