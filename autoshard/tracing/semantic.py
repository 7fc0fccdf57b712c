"""Keeps semantic operators whole: attention, dropout, losses, RMS norm and recurrent layers (`ctc`, `recurrent`).

PyTorch decomposes these operators before a trace sees them, and differently on each device. During a trace, each
becomes a call of an `autoshard::*` operator (`autoshard.kernels`). Cases that a semantic operator does not cover (class
weights, a mask that requires grad) become ordinary operators that compute the same result.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional as F

import autoshard.kernels as kernels
from autoshard.errors import TraceError
from autoshard.ir.precision import widen
from autoshard.kernels.library import gradients_with_graph
from autoshard.tracing.ctc import CTC
from autoshard.tracing.dense import DENSE
from autoshard.tracing.random_numbers import SITES
from autoshard.tracing.recurrent import RECURRENT
from autoshard.tracing.replaced import replaced_operators
from autoshard.tracing.transforms import call_operator, is_transformed

_MEAN, _SUM = 1, 2
_CROSS_ENTROPY: OpOverload = torch.ops.aten.cross_entropy_loss.default


def keep_operators_whole(*, wide_losses: bool = False) -> contextlib.AbstractContextManager[None]:
    """Return a context in which attention, dropout, losses, RMS norm and recurrent layers run as semantic operators.

    With `wide_losses`, the cross-entropy of 16-bit logits stays float32 and is not rounded to 16 bits.
    """
    return replaced_operators(_REPLACEMENTS | ({_CROSS_ENTROPY: _wide_cross_entropy} if wide_losses else {}))


def _drop(x: Tensor, p: float) -> Tensor:
    """Return `x` after dropout with probability p, 0 < p < 1, by the counter-based generator."""
    if is_transformed():  # vmap has rules, and a mode of randomness, for the operator that torch draws with
        return x * torch.bernoulli(torch.full_like(x, 1.0 - p)) / (1.0 - p)
    sites = SITES.get()
    return torch.ops.autoshard.dropout(x, sites.seed, p, sites.take(), [0] * x.dim(), list(x.shape))


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0.0 or statically_known_true(x.numel() == 0):
        return x
    return x * 0.0 if p == 1.0 else _drop(x, p)


def _dropout_(x: Tensor, p: float, train: bool) -> Tensor:
    return x.copy_(_dropout(x, p, train)) if train and p > 0.0 else x


def _feature_dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """Return `x` [N, C, ...] after a dropout of whole channels."""
    if not train or p == 0.0:
        return x
    channels = torch.ones((*x.shape[:2], *([1] * (x.dim() - 2))), dtype=x.dtype, device=x.device)
    return x * _dropout(channels, p, train)


def _feature_dropout_(x: Tensor, p: float, train: bool) -> Tensor:
    return x.copy_(_feature_dropout(x, p, train)) if train and p > 0.0 else x


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute scaled dot-product attention over [..., S, D] by the semantic operator, which takes [B, H, S, D]."""
    if is_causal and attn_mask is not None:
        raise TraceError("scaled_dot_product_attention got both attn_mask and is_causal=True; give one of them.")
    if enable_gqa and query.dim() == 3:  # [H, S, D]
        q, k, v = (x.unsqueeze(0) for x in (query, key, value))
        return _attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=True).squeeze(0)
    scale = 1.0 / math.sqrt(query.size(-1)) if scale is None else scale
    lead = _broadcast_lead(query, key, value, enable_gqa)
    q, k, v = (_to_four_dims(x, lead) for x in _match_heads(query, key, value, enable_gqa))
    mask = None if attn_mask is None else _mask_to_four_dims(attn_mask, lead)
    q, k, v = _expand_batch(q, k, v)
    out = _attention_4d(q, k, v, mask, dropout_p, is_causal, scale)
    return out if len(lead) == 2 else out.reshape(*lead, *out.shape[-2:])


def _attention_4d(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float
) -> Tensor:
    probabilities = [q.size(0), q.size(1), q.size(2), k.size(2)]
    seed, site = None, 0
    if dropout_p > 0.0 and is_transformed():
        drop = partial(_dropout, p=dropout_p, train=True)
        rest = (None, 0.0, is_causal, scale, site, [0, 0, 0, 0], probabilities)
        return kernels.attention_composite(q, k, v, mask, *rest, drop)[0]
    if dropout_p > 0.0:
        sites = SITES.get()
        seed, site = sites.seed, sites.take()
    rest = (seed, dropout_p, is_causal, scale, site, [0, 0, 0, 0], probabilities)
    if mask is not None and mask.requires_grad:
        return kernels.attention_composite(q, k, v, mask, *rest)[0]
    return call_operator(kernels.attention, q, k, v, mask, *rest)[0]


def _broadcast_lead(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[int, ...]:
    """Return the result's dims before the last two."""
    if enable_gqa:
        batch = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
        return (*batch, query.size(-3))
    return tuple(torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2]))


def _match_heads(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value. Heads of key and value are repeated if the semantic operator cannot share them."""
    if not enable_gqa or key.size(-3) == value.size(-3):
        return query, key, value
    heads = query.size(-3)
    return (
        query,
        key.repeat_interleave(heads // key.size(-3), -3),
        value.repeat_interleave(heads // value.size(-3), -3),
    )


def _to_four_dims(x: Tensor, lead: tuple[int, ...]) -> Tensor:
    """Return `x` [..., S, D] as [B, H, S, D].

    A missing dim of heads is added; more than two leading dims are merged.
    """
    if len(lead) <= 2:
        return x if x.dim() == 4 else x[(None,) * (4 - x.dim())] if len(lead) == 2 else _one_head(x)
    own = x[(None,) * (3 - x.dim())].shape[-3:]  # keys may have fewer heads than queries
    return x.expand(*lead[:-1], *own).reshape(-1, *own)


def _one_head(x: Tensor) -> Tensor:
    """Return `x` [B, S, D] or [S, D] as [B, 1, S, D]."""
    return x.unsqueeze(-3) if x.dim() == 3 else x.unsqueeze(0).unsqueeze(0)


def _mask_to_four_dims(mask: Tensor, lead: tuple[int, ...]) -> Tensor:
    """Return a mask [..., S, S] as [B, H, S, S]; any dim may have size one. `lead` is that of `_to_four_dims`."""
    if len(lead) == 1 and mask.dim() == 3:
        return mask.unsqueeze(-3)
    mask = mask[(None,) * (4 - mask.dim())]
    if any(size > 1 for size in mask.shape[:-3]) and len(lead) > 2:
        mask = mask.expand(*lead[:-1], *mask.shape[-3:])
    return mask.flatten(0, -4)


def _expand_batch(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v expanded to a common batch size and number of heads, as torch's broadcasting does."""
    batch = max(q.size(0), k.size(0), v.size(0))
    heads = max(k.size(1), v.size(1))
    q = q.expand(batch, max(q.size(1), heads), -1, -1)
    return q, k.expand(batch, heads, -1, -1), v.expand(batch, heads, -1, -1)


def _cross_entropy(logits: Tensor, target: Tensor, *rest: Any, **options: Any) -> Tensor:
    return _wide_cross_entropy(logits, target, *rest, **options).to(logits.dtype)


def _wide_cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compute the cross-entropy of [N, C, ...] or [C] logits, in float32 if they are narrower."""
    class_dim = 0 if logits.dim() == 1 else 1
    if target.is_floating_point():
        logits = widen(logits)
        return _soft_cross_entropy(logits, target, weight, reduction, label_smoothing, class_dim)
    rows = logits.movedim(class_dim, -1).reshape(-1, logits.size(class_dim))
    row_target = target.reshape(-1).to(torch.int64)
    if weight is not None:
        loss, count = _weighted_rows(widen(rows), row_target, weight, ignore_index, label_smoothing)
    else:
        loss = call_operator(kernels.cross_entropy, rows, row_target, ignore_index, label_smoothing)[0]
        count = (row_target != ignore_index).sum()
    return _reduce_rows(loss, count, reduction, target.shape)


def _weighted_rows(
    rows: Tensor, target: Tensor, weight: Tensor, ignore_index: int, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    """Return the loss of each row [N] under class weights [C], and the sum of the rows' weights, for a weighted mean.

    Ignored rows have loss and weight 0.
    """
    is_counted = target != ignore_index
    safe = torch.where(is_counted, target, 0)
    log_p = F.log_softmax(rows, dim=-1)
    row_weight = torch.where(is_counted, weight[safe], 0.0)
    loss = -row_weight * log_p.gather(-1, safe[:, None]).squeeze(-1)
    if label_smoothing > 0.0:
        smooth = torch.where(is_counted, -(log_p * weight).sum(-1), 0.0)
        loss = (1.0 - label_smoothing) * loss + label_smoothing / rows.size(-1) * smooth
    return loss, row_weight.sum()


def _soft_cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    label_smoothing: float,
    class_dim: int,
) -> Tensor:
    if label_smoothing > 0.0:
        target = target * (1.0 - label_smoothing) + label_smoothing / logits.size(class_dim)
    terms = F.log_softmax(logits, dim=class_dim) * target
    if weight is not None:
        terms = terms * weight.reshape([-1 if dim == class_dim else 1 for dim in range(logits.dim())])
    loss = -terms.sum(class_dim)
    if reduction == _MEAN:
        return loss.sum() / (logits.numel() // logits.size(class_dim))
    return loss.sum() if reduction == _SUM else loss


def _reduce_rows(loss: Tensor, count: Tensor, reduction: int, shape: Sequence[int]) -> Tensor:
    if reduction == _MEAN:
        return loss.sum() / count
    return loss.sum() if reduction == _SUM else loss.reshape(shape)


class _RmsNorm(torch.autograd.Function):
    """RMS norm with a derivative. torch has an operator for each direction, but no derivative on all devices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, normalized_shape: list[int], weight: Tensor | None, eps: float | None) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            out, rstd = torch.ops.aten._fused_rms_norm.default(x, normalized_shape, weight, eps)
        ctx.save_for_backward(x, rstd, weight)
        ctx.normalized_shape, ctx.eps = normalized_shape, eps
        ctx.mark_non_differentiable(rstd)
        return out, rstd

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        x, rstd, weight = ctx.saved_tensors
        if torch.is_grad_enabled():
            operands = (x, ctx.normalized_shape, weight, ctx.eps)
            return gradients_with_graph(ctx, kernels.rms_norm_composite, operands, (grad, None))
        mask = [ctx.needs_input_grad[0], weight is not None and ctx.needs_input_grad[2]]
        dx, dw = torch.ops.aten._fused_rms_norm_backward.default(grad, x, ctx.normalized_shape, rstd, weight, mask)
        return dx if mask[0] else None, None, dw if mask[1] else None, None


def _fused_rms_norm(
    x: Tensor, normalized_shape: list[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    """Return the result and the reciprocal root mean square of RMS norm.

    Below autograd, return NotImplemented, so that torch keeps the operator whole.
    """
    if torch._C._dispatch_tls_is_dispatch_key_excluded(DispatchKey.AutogradFunctionality):
        return NotImplemented
    return _norm(x, normalized_shape, weight, eps)


def _rms_norm(x: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    return _norm(x, normalized_shape, weight, eps)[0]


def _norm(x: Tensor, normalized_shape: list[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    run = kernels.rms_norm_composite if is_transformed() else _RmsNorm.apply
    return run(x, normalized_shape, weight, eps)


_REPLACEMENTS: dict[OpOverload, Callable[..., Any]] = {
    torch.ops.aten.scaled_dot_product_attention.default: _attention,
    torch.ops.aten.dropout.default: _dropout,
    torch.ops.aten.dropout_.default: _dropout_,
    torch.ops.aten.feature_dropout.default: _feature_dropout,
    torch.ops.aten.feature_dropout_.default: _feature_dropout_,
    _CROSS_ENTROPY: _cross_entropy,
    torch.ops.aten.rms_norm.default: _rms_norm,
    torch.ops.aten._fused_rms_norm.default: _fused_rms_norm,
    **CTC,
    **DENSE,
    **RECURRENT,
}
