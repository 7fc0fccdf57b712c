"""`autoshard::packed_attention` and its backward: attention within sequences that are concatenated in one tensor.

Each sequence computes attention as defined in `attention.py`. Sequences may have unequal lengths, without padding. S is
the number of queries of all sequences, and T is the number of their keys.

Sequence i has the queries query_starts[i] to query_starts[i + 1] - 1, and the keys key_starts[i] to
key_starts[i + 1] - 1. The first start is 0, and the last start is S or T. The last query of a sequence has the position
of its last key. So in a sequence of s queries and t keys, query i is at position i + t - s.

A causal query attends to no later positions. With a window w > 0, a query attends to the last w positions, including
its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from autoshard.kernels.attention import attention_backward_reference, attention_reference
from autoshard.kernels.library import accumulation_dtype, define, differentiate, refuse_derivative


def packed_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    is_causal: bool,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Compute attention within each sequence, with sums in float32 (float64 for float64 inputs).

    Args:
        q: [S, H, D].
        k, v: [T, G, D], with G a divisor of H.
        query_starts, key_starts: [sequences + 1] int32, as in the module's docstring.
        is_causal: whether queries attend to no later positions.
        window: the number of positions that a query attends to; 0 for all.
        scale: factor on the scores, usually 1 / sqrt(D).

    Returns:
        out [S, H, D] in q's dtype, and the log-sum-exp [H, S] in float32 (float64 for float64 inputs).

    Raises:
        ValueError: shapes do not fit.
    """
    out, lse = _fake(q, k, v, query_starts, key_starts, is_causal, window, scale)
    for rows, columns in _sequences(query_starts, key_starts):
        heads = (_heads_first(q[rows]), _heads_first(k[columns]), _heads_first(v[columns]))
        found, norm = attention_reference(*heads, *_options(heads[0], heads[1], is_causal, window, scale))
        out[rows], lse[:, rows] = _heads_second(found), norm[0]
    return out, lse


def packed_attention_backward_reference(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    is_causal: bool,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, with their shapes and dtypes. grad_out is [S, H, D]."""
    grads = _fake_backward(grad_out, q, k, v)
    for rows, columns in _sequences(query_starts, key_starts):
        heads = (_heads_first(q[rows]), _heads_first(k[columns]), _heads_first(v[columns]))
        mask, *rest = _options(heads[0], heads[1], is_causal, window, scale)
        results = (_heads_first(out[rows]), lse[None, :, rows])
        found = attention_backward_reference(_heads_first(grad_out[rows]), *heads, mask, *results, *rest)
        for grad, part, value in zip(grads, (rows, columns, columns), found, strict=True):
            grad[part] = _heads_second(value)
    return grads


def _sequences(query_starts: Tensor, key_starts: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield the slice of queries and the slice of keys of each sequence."""
    queries, keys = query_starts.tolist(), key_starts.tolist()
    for index in range(len(queries) - 1):
        yield slice(*queries[index : index + 2]), slice(*keys[index : index + 2])


def _heads_first(x: Tensor) -> Tensor:
    """Return a view of [S, H, D] as [1, H, S, D]."""
    return x.transpose(0, 1)[None]


def _heads_second(x: Tensor) -> Tensor:
    """Return a view of [1, H, S, D] as [S, H, D]."""
    return x[0].transpose(0, 1)


def _options(q: Tensor, k: Tensor, is_causal: bool, window: int, scale: float) -> tuple[Any, ...]:
    """Return the arguments that follow q, k and v in a call of `attention_reference` for one sequence.

    The first is the window's mask, or None without a window.
    """
    queries, keys = q.shape[2], k.shape[2]
    place = torch.arange(keys - queries, keys, device=q.device)[:, None]
    mask = place - torch.arange(keys, device=q.device) < window if window > 0 else None
    return mask, None, 0.0, is_causal, scale, 0, [0, 0, keys - queries, 0], [1, q.shape[1], queries, keys]


def _check(q: Tensor, k: Tensor, v: Tensor, query_starts: Tensor, key_starts: Tensor) -> None:
    shapes = f"q={tuple(q.shape)}, k={tuple(k.shape)}, v={tuple(v.shape)}"
    if not (q.dim() == k.dim() == v.dim() == 3) or k.shape != v.shape or q.shape[2] != k.shape[2]:
        raise ValueError(f"packed attention takes q [S, H, D], k and v [T, G, D]; found {shapes}.")
    if q.shape[1] % k.shape[1] != 0:
        raise ValueError(f"packed attention's query heads must be a multiple of its key heads: {shapes}.")
    starts = f"{tuple(query_starts.shape)} {query_starts.dtype} and {tuple(key_starts.shape)} {key_starts.dtype}"
    if query_starts.dim() != 1 or query_starts.shape != key_starts.shape or len(query_starts) < 2:
        raise ValueError(f"packed attention takes equally many starts of queries and keys, and an end; found {starts}.")
    if not query_starts.dtype == key_starts.dtype == torch.int32:
        raise ValueError(f"packed attention takes starts in int32; found {starts}.")


def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    is_causal: bool,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    _check(q, k, v, query_starts, key_starts)
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=accumulation_dtype(q.dtype))


def _fake_backward(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.is_causal, ctx.window, ctx.scale = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors[:3], out, lse, *tensors[3:])


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: None) -> tuple[Tensor | None, ...]:
    nothing = (None,) * 5
    if grad_out is None:
        return None, None, None, *nothing
    grads = packed_attention_backward(grad_out, *ctx.saved_tensors, ctx.is_causal, ctx.window, ctx.scale)
    return *grads, *nothing


_CONSTANTS = "Tensor query_starts, Tensor key_starts, bool is_causal, SymInt window, float scale"
"""The last arguments in the schemas of both operators."""

packed_attention = define(
    "packed_attention",
    f"(Tensor q, Tensor k, Tensor v, {_CONSTANTS}) -> (Tensor out, Tensor lse)",
    packed_attention_reference,
    _fake,
)
packed_attention_backward = define(
    "packed_attention_backward",
    f"(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_CONSTANTS})"
    " -> (Tensor dq, Tensor dk, Tensor dv)",
    packed_attention_backward_reference,
    _fake_backward,
)
differentiate(packed_attention, _setup_context, _backward)
refuse_derivative(packed_attention_backward, "Attention within packed sequences")
