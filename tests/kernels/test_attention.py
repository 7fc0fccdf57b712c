"""`autoshard::attention` against torch's math attention in float64, and against its own slices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from autoshard.kernels import attention, attention_composite, keep_mask

SEED = torch.tensor(23)
SCALE = 0.4


def _inputs(
    heads: int = 4, groups: int = 2, s: int = 5, t: int = 6, dtype: torch.dtype = torch.float64, e: int = 3
) -> tuple[Tensor, Tensor, Tensor]:
    """q [2, heads, s, 4], k [2, groups, t, 4], v [2, groups, t, e], all requiring grad."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, s, 4), (2, groups, t, 4), (2, groups, t, e)]
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return q.to(dtype).requires_grad_(), k.to(dtype).requires_grad_(), v.to(dtype).requires_grad_()


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, is_causal: bool = False, p: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The operator on whole tensors, which are no shards."""
    whole = [q.shape[0], q.shape[1], q.shape[2], k.shape[2]]
    return attention(q, k, v, mask, SEED if p else None, p, is_causal, SCALE, 1, [0] * 4, whole)


def _torch_math(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=is_causal, scale=SCALE, enable_gqa=q.shape[1] != k.shape[1]
        )


def _masks(kind: str, s: int, t: int, heads: int) -> Tensor | None:
    if kind == "none":
        return None
    if kind == "bool":
        return (torch.arange(s * t).view(1, 1, s, t) % 3 != 0) | (torch.arange(t) == 0)
    return torch.randn(heads, 1, t, dtype=torch.float64)


def _assert_same_gradients(out: Tensor, expected: Tensor, inputs: tuple[Tensor, ...]) -> None:
    grad = torch.randn(out.shape, dtype=out.dtype)
    actual = torch.autograd.grad(out, inputs, grad)
    wanted = torch.autograd.grad(expected, inputs, grad)
    for mine, torchs in zip(actual, wanted, strict=True):
        torch.testing.assert_close(mine, torchs)


@given(
    st.sampled_from([(1, 1), (4, 4), (4, 2), (3, 1)]),
    st.integers(1, 6),
    st.integers(1, 6),
    st.sampled_from(["none", "bool", "float", "causal"]),
)
def test_equals_torch_in_float64(heads_groups: tuple[int, int], s: int, t: int, kind: str) -> None:
    """Output and gradients equal those of torch's math attention to float64 rounding. The log-sum-exp is float64
    and has no gradient."""
    heads, groups = heads_groups
    q, k, v = _inputs(heads, groups, s, t)
    is_causal = kind == "causal"
    mask = None if is_causal else _masks(kind, s, t, heads)
    out, lse = _attend(q, k, v, mask, is_causal)
    expected = _torch_math(q, k, v, mask, is_causal)
    torch.testing.assert_close(out, expected)
    assert lse.dtype == torch.float64
    assert not lse.requires_grad
    _assert_same_gradients(out, expected, (q, k, v))


def test_equals_torch_in_float32() -> None:
    """In float32 the output agrees with torch's math attention within 1e-6 relative."""
    q, k, v = _inputs(dtype=torch.float32)
    out, lse = _attend(q, k, v, is_causal=True)
    expected = _torch_math(q, k, v, None, True)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    assert lse.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_inputs_sum_in_float32(dtype: torch.dtype) -> None:
    """With 16-bit inputs the output errs by a rounding of float64's, and gradients come in the inputs' dtype."""
    q, k, v = _inputs(dtype=dtype)
    out, lse = _attend(q, k, v)
    expected = _torch_math(q.double(), k.double(), v.double(), None, False)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
    assert {grad.dtype for grad in torch.autograd.grad(out.sum(), (q, k, v))} == {dtype}


def test_dropout_equals_explicit_mask() -> None:
    """With dropout, output and gradients equal those of the composition with the Philox mask."""
    q, k, v = _inputs(groups=4)
    out, _ = _attend(q, k, v, is_causal=True, p=0.4)
    keep = keep_mask((2, 4, 5, 6), [0] * 4, (2, 4, 5, 6), SEED, 1, 0.4)
    causal = torch.ones(5, 6, dtype=torch.bool).tril()
    scores = (SCALE * q @ k.mT).masked_fill(~causal, float("-inf"))
    expected = (torch.softmax(scores, -1) * keep / 0.6) @ v
    torch.testing.assert_close(out, expected)
    _assert_same_gradients(out, expected, (q, k, v))


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_shards_of_batch_heads_and_queries_equal_slices(p: float) -> None:
    """Attention of a shard of batch, heads and queries, given the shard's offset, equals the slice of the whole
    attention."""
    q, k, v = _inputs(heads=4, groups=2, s=6, t=6)
    whole, lse = _attend(q, k, v, is_causal=True, p=p)
    part, part_lse = attention(
        q[1:, 2:, 4:], k[1:, 1:], v[1:, 1:], None, SEED, p, True, SCALE, 1, [1, 2, 4, 0], [2, 4, 6, 6]
    )
    torch.testing.assert_close(part, whole[1:, 2:, 4:])
    torch.testing.assert_close(part_lse, lse[1:, 2:, 4:])


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_shards_of_keys_combine_by_lse(p: float) -> None:
    """Outputs over shards of the keys, weighted by exp(lse - total), sum to the whole output, as ring
    attention needs."""
    q, k, v = _inputs(s=6, t=6)
    whole, total = _attend(q, k, v, is_causal=True, p=p)
    combined = torch.zeros_like(whole)
    for start in (0, 3):
        keys, values = k[:, :, start : start + 3], v[:, :, start : start + 3]
        out, lse = attention(q, keys, values, None, SEED, p, True, SCALE, 1, [0, 0, 0, start], [2, 4, 6, 6])
        combined = combined + out * torch.exp(lse - total).unsqueeze(-1)
    torch.testing.assert_close(combined, whole)


@pytest.mark.parametrize("is_float", [False, True])
def test_fully_masked_rows_are_zero(is_float: bool) -> None:
    """A query that may attend to no key has output 0, log-sum-exp -inf and a zero gradient, and no gradient is NaN."""
    q, k, v = _inputs()
    mask = torch.ones(5, 6, dtype=torch.bool)
    mask[2] = False
    if is_float:
        mask = torch.zeros(5, 6, dtype=torch.float64).masked_fill(~mask, float("-inf"))
    out, lse = _attend(q, k, v, mask)
    assert bool((out[:, :, 2] == 0).all())
    assert bool((lse[:, :, 2] == -float("inf")).all())
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(bool(grad.isfinite().all()) for grad in grads)
    assert bool((grads[0][:, :, 2] == 0).all())


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_composite_equals_operator_and_has_a_mask_gradient(p: float) -> None:
    """`attention_composite` has the operator's output and gradients, and also a finite gradient of its mask."""
    q, k, v = _inputs()
    mask = torch.randn(5, 6, dtype=torch.float64)
    mask[3] = -float("inf")
    mask.requires_grad_()
    (out,) = attention_composite(q, k, v, mask, SEED, p, False, SCALE, 1, [0] * 4, [2, 4, 5, 6])
    expected, _ = _attend(q, k, v, mask.detach(), p=p)
    torch.testing.assert_close(out, expected)
    (grad,) = torch.autograd.grad(out.sum(), mask, retain_graph=True)
    _assert_same_gradients(expected, out, (q, k, v))
    assert bool(grad.isfinite().all())


def test_mask_that_requires_grad_is_refused() -> None:
    """The backward with a mask that requires a gradient is refused, and the error names `attention_composite`."""
    q, k, v = _inputs()
    mask = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    out, _ = _attend(q, k, v, mask)
    with pytest.raises(NotImplementedError, match="attention_composite"):
        out.sum().backward()


def test_dropout_without_a_seed_is_refused() -> None:
    """Dropout with p > 0 and no seed is refused."""
    q, k, v = _inputs()
    with pytest.raises(ValueError, match=r"dropout_p=0\.5 needs a seed"):
        attention(q, k, v, None, None, 0.5, False, SCALE, 1, [0] * 4, [2, 4, 5, 6])


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 3, 4), (2, 3, 4), (2, 3, 4)), "takes q"),
        (((1, 2, 3, 4), (1, 2, 3, 5), (1, 2, 3, 5)), "do not fit"),
        (((1, 3, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4)), "multiple of its key heads"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes: tuple[tuple[int, ...], ...], message: str) -> None:
    """q, k and v that are not of four dims, or differ in head size, or whose heads do not divide, are refused."""
    q, k, v = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(ValueError, match=message):
        attention(q, k, v, None, None, 0.0, False, SCALE, 1, [0] * 4, [1] * 4)


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_opcheck(p: float) -> None:
    """Torch's checks of a custom operator pass: schema, fake tensors, autograd registration and AOT dispatch."""
    q, k, v = _inputs()
    q = q.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    seed = SEED if p else None
    torch.library.opcheck(attention, (q, k, v, None, seed, p, True, SCALE, 1, [0] * 4, [2, 4, 5, 6]))
