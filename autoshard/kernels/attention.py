"""`autoshard::attention` and its backward: softmax(scale q k^T + mask) v, as one operator for every device.

Vaswani et al., "Attention is all you need" (2017), section 3.2.1. The backward from the log-sum-exp follows
Dao et al., "FlashAttention" (2022), appendix B.4. Grouped heads follow Ainslie et al., "GQA" (2023).
Shapes: B batch, H query heads, G key heads (H = G g), S queries, T keys, D head size, E value size.

    s   = scale q k^T + mask                  [B, H, S, T]   (-inf where masked)
    lse = log sum_t exp(s)                    [B, H, S]      (-inf where a row is masked throughout)
    p   = exp(s - lse),  w = keep p / (1 - dropout_p)        (keep: Philox at the global index)
    out = w v                                 [B, H, S, E]   (0 where a row is masked throughout)

    dv = w^T dout,  dw = dout v^T,  delta = sum_e dout out = sum_t w dw
    ds = w dw - p delta,  dq = scale ds k,  dk = scale ds^T q

In causal attention the query of global row i attends to the keys of global columns j <= i. `offset` and `global_shape`
say where a rank's shard of the matrix of scores lies in the whole matrix.

Results have the memory layout that torch's fused kernels give them. `out` has the layout of q, and gradients are
row-major [B, S, H, D]. So the reshapes and transposes around attention are views, as in eager mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autoshard.kernels.library import accumulation_dtype, define, differentiate
from autoshard.kernels.philox import keep_mask, keep_scale

_INFINITY = float("inf")


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float,
    site: int,
    offset: Sequence[int],
    global_shape: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Compute attention of grouped heads, with sums in float32 (float64 for float64 inputs).

    Args:
        q: [B, H, S, D].
        k: [B, G, T, D], with G a divisor of H.
        v: [B, G, T, E].
        mask: broadcastable to [B, H, S, T]. A bool mask is True where a query may attend. A float mask is added to the
            scores.
        seed: int64 scalar tensor, needed if dropout_p > 0.
        dropout_p: the probability that an attention weight is dropped, in [0, 1].
        is_causal: whether to mask, besides `mask`, the scores whose global column index exceeds the global row index.
        scale: factor on the scores, usually 1 / sqrt(D).
        site: the number of this random operator in the program, for the random numbers of dropout.
        offset: index [b, h, s, t] of this rank's first score among the global scores.
        global_shape: the shape [B, H, S, T] of the global scores.

    Returns:
        out [B, H, S, E] in q's dtype, and lse [B, H, S] in float32 (float64 for float64 inputs).

    Raises:
        ValueError: shapes do not fit each other, or dropout has no seed.
    """
    check_attention(q, k, v, seed, dropout_p)
    scores = _scores(q, k, mask, is_causal, scale, offset)
    lse = torch.logsumexp(scores, dim=-1)  # [B, H, S]
    weights = _probabilities(scores, lse)
    if dropout_p > 0.0:
        weights = weights * _keep(scores, seed, dropout_p, site, offset, global_shape)
    out = _merge(torch.matmul(_group(weights, k), v.to(scores.dtype)), q)
    like_out, like_lse = empty_results(q, v)
    return in_layout_of(like_out, out.to(q.dtype)), in_layout_of(like_lse, lse)


def attention_backward_reference(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    seed: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float,
    site: int,
    offset: Sequence[int],
    global_shape: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, in their shapes and dtypes.

    `grad_out` [B, H, S, E] is the gradient of `out`. The other arguments are arguments and results of
    `attention_reference`.
    """
    scores = _scores(q, k, mask, is_causal, scale, offset)
    dtype = scores.dtype
    probabilities = _probabilities(scores, lse)  # p
    grad = _group(grad_out.to(dtype), k)  # [B, G, g S, E]
    grad_weights = _merge(torch.matmul(grad, v.to(dtype).mT), q)  # dw [B, H, S, T]
    weights = probabilities
    if dropout_p > 0.0:
        keep = _keep(scores, seed, dropout_p, site, offset, global_shape)
        weights, grad_weights = probabilities * keep, grad_weights * keep
    delta = (grad_out.to(dtype) * out.to(dtype)).sum(-1, keepdim=True)  # [B, H, S, 1]
    grad_scores = _group(probabilities * (grad_weights - delta) * scale, k)  # [B, G, g S, T]
    dq = _merge(torch.matmul(grad_scores, k.to(dtype)), q)
    dk = torch.matmul(grad_scores.mT, _group(q.to(dtype), k))
    dv = torch.matmul(_group(weights, k).mT, grad)
    return in_row_major_layout(dq.to(q.dtype)), in_row_major_layout(dk.to(k.dtype)), in_row_major_layout(dv.to(v.dtype))


def attention_composite(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float,
    site: int,
    offset: Sequence[int],
    global_shape: Sequence[int],
    drop: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor]:
    """Compute `attention_reference` with operators that torch can differentiate, and return `out` in a tuple.

    The function serves second derivatives, and masks that require a gradient. `drop` maps the weights [B, H, S, T] to
    weights after dropout. If `drop` is None, the operator `autoshard::dropout` drops the same weights as
    `autoshard::attention`.
    """
    check_attention(q, k, v, seed, dropout_p)
    scores = _scores(q, k, mask, is_causal, scale, offset)
    is_dead = (scores == -_INFINITY).all(-1, keepdim=True)
    weights = torch.softmax(torch.where(is_dead, 0.0, scores), dim=-1)
    weights = torch.where(is_dead, 0.0, weights)
    if drop is not None:
        weights = drop(weights)
    elif dropout_p > 0.0:
        weights = torch.ops.autoshard.dropout(weights, seed, dropout_p, site, offset, global_shape)
    return (_merge(torch.matmul(_group(weights, k), v.to(scores.dtype)), q).to(q.dtype),)


def check_attention(q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None, dropout_p: float) -> None:
    """Raise `ValueError` if the shapes of q, k and v do not fit each other, or dropout has no seed."""
    shapes = f"q={tuple(q.shape)}, k={tuple(k.shape)}, v={tuple(v.shape)}"
    if not (q.dim() == k.dim() == v.dim() == 4):
        raise ValueError(f"attention takes q [B, H, S, D], k [B, G, T, D], v [B, G, T, E]; found {shapes}.")
    if q.shape[-1] != k.shape[-1] or k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0]:
        raise ValueError(f"attention's q, k and v do not fit each other: {shapes}.")
    if q.shape[1] % k.shape[1] != 0:
        raise ValueError(f"attention's query heads must be a multiple of its key heads: {shapes}.")
    if dropout_p > 0.0 and seed is None:
        raise ValueError(f"attention with dropout_p={dropout_p!r} needs a seed; found seed=None.")


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, scale: float, offset: Sequence[int]) -> Tensor:
    """Return the scores [B, H, S, T] in the accumulation dtype (`accumulation_dtype`), -inf where masked."""
    dtype = accumulation_dtype(q.dtype)
    scores = _merge(torch.matmul(_group(q.to(dtype) * scale, k), k.to(dtype).mT), q)
    if is_causal:
        rows = torch.arange(q.shape[2], device=q.device) + offset[2]
        columns = torch.arange(k.shape[2], device=q.device) + offset[3]
        scores = scores.masked_fill(columns > rows.unsqueeze(-1), -_INFINITY)
    if mask is None:
        return scores
    if mask.dtype == torch.bool:
        return scores.masked_fill(mask.logical_not(), -_INFINITY)
    return scores + mask.to(dtype)


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """Return exp(scores - lse), with rows of 0 for queries that are masked throughout (lse = -inf)."""
    lse = lse.to(scores.dtype)
    return torch.exp(scores - torch.where(lse == -_INFINITY, _INFINITY, lse).unsqueeze(-1))


def _keep(
    scores: Tensor,
    seed: Tensor | None,
    dropout_p: float,
    site: int,
    offset: Sequence[int],
    global_shape: Sequence[int],
) -> Tensor:
    """Return the factors of dropout [B, H, S, T]: 1 / (1 - dropout_p) for kept probabilities, else 0."""
    assert seed is not None
    keep = keep_mask(scores.shape, offset, global_shape, seed, site, dropout_p)
    return keep.to(scores.dtype) * keep_scale(dropout_p)


def _group(x: Tensor, k: Tensor) -> Tensor:
    """Reshape `x` [B, H, S, X] to [B, G, g S, X], where G is the number of heads in `k`.

    The g query heads that share a key head become rows of one matrix.
    """
    b, h, s, width = x.shape
    groups = k.shape[1]
    return x.reshape(b, groups, h // groups * s, width)


def _merge(x: Tensor, q: Tensor) -> Tensor:
    return x.reshape(*q.shape[:3], x.shape[-1])


def fake_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor | None, dropout_p: float, *rest: object
) -> tuple[Tensor, Tensor]:
    """Return empty results of attention with the right shapes, dtypes and layouts."""
    check_attention(q, k, v, seed, dropout_p)
    return empty_results(q, v)


def fake_attention_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: object
) -> tuple[Tensor, Tensor, Tensor]:
    """Return empty gradients of q, k and v with the right shapes, dtypes and layouts."""
    return empty_row_major(q), empty_row_major(k), empty_row_major(v)


def empty_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return empty tensors out [B, H, S, E] and lse [B, H, S], with the strides of torch's kernel for the device."""
    out = torch.empty_like(q) if q.shape[3] == v.shape[3] else empty_row_major(q, v.shape[3])
    batch, heads, rows, _ = q.shape
    dtype = accumulation_dtype(q.dtype)
    if q.device.type == "cpu":
        return out, q.new_empty((batch, rows, heads), dtype=dtype).transpose(1, 2)
    return out, q.new_empty((batch, heads, rows), dtype=dtype)


def empty_row_major(x: Tensor, size: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Return an empty tensor [B, H, S, size] whose memory is that of a contiguous tensor [B, S, H, size].

    `x` [B, H, S, D] gives B, H, S and the device. By default, `size` is D, and `dtype` is the dtype of `x`.
    """
    batch, heads, rows, width = x.shape
    shape = (batch, rows, heads, width if size is None else size)
    return x.new_empty(shape, dtype=dtype or x.dtype).transpose(1, 2)


def in_layout_of(like: Tensor, x: Tensor) -> Tensor:
    """Return `x`, or a copy of `x` whose dims lie in memory in the same order as the dims of `like`."""
    order = sorted(range(x.dim()), key=like.stride, reverse=True)
    ordered = x.permute(order)
    if ordered.is_contiguous():
        return x
    return ordered.clone(memory_format=torch.contiguous_format).permute([order.index(dim) for dim in range(x.dim())])


def in_result_layout(q: Tensor, out: Tensor) -> Tensor:
    """Return `out`, a kernel's row-major result [B, H, S, E], with its dims in memory ordered as those of `q`.

    The result is a copy of `out` if needed. If E differs from the head size of `q`, the result is `out` itself.
    """
    batch, head, row, element = q.stride()
    is_by_rows = batch >= row >= head >= element
    return out if is_by_rows or q.shape != out.shape else in_layout_of(torch.empty_like(q), out)


def in_row_major_layout(x: Tensor) -> Tensor:
    """Return `x` [B, H, S, D], copied if needed, with the memory of a contiguous tensor [B, S, H, D]."""
    rows = x.transpose(1, 2)
    return x if rows.is_contiguous() else rows.clone(memory_format=torch.contiguous_format).transpose(1, 2)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, seed, *ctx.constants = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, mask, out, lse, seed)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: None) -> tuple[Tensor | None, ...]:
    if ctx.needs_input_grad[3]:
        raise NotImplementedError(
            "autoshard::attention has no gradient for its mask; use attention_composite for a mask that requires grad."
        )
    nothing = (None,) * 8
    if grad_out is None:
        return None, None, None, *nothing
    q, k, v, mask, out, lse, seed = ctx.saved_tensors
    grads = attention_backward(grad_out, q, k, v, mask, out, lse, seed, *ctx.constants)
    return *grads, *nothing


_CONSTANTS = "float dropout_p, bool is_causal, float scale, SymInt site, SymInt[] offset, SymInt[] global_shape"

ARGUMENTS = f"(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? seed, {_CONSTANTS}) -> (Tensor out, Tensor lse)"
BACKWARD_ARGUMENTS = (
    "(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor out, Tensor lse, Tensor? seed, "
    f"{_CONSTANTS}) -> (Tensor dq, Tensor dk, Tensor dv)"
)

attention = define("attention", ARGUMENTS, attention_reference, fake_attention)
attention_backward = define(
    "attention_backward", BACKWARD_ARGUMENTS, attention_backward_reference, fake_attention_backward
)
differentiate(attention, _setup_context, _backward, attention_composite)
