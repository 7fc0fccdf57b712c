"""Rules of `autoshard::attention`.

Batch, heads and queries are independent, so ranks may split them. A group of query heads shares a key head, so heads
are split by key heads first. The masks of dropout and causality follow the global index, so a piece needs its offset in
the matrix of probabilities. If queries are split, either each rank has all keys and values, or the same axis splits
them. In the latter case, keys and values go round the ranks of the axis (`autoshard.kernels.ring_attention`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import autoshard.kernels as kernels
from autoshard.ir.spec import PartitionSpec
from autoshard.rules.dims import broadcast_dims
from autoshard.rules.local import LocalContext, shifted
from autoshard.rules.notation import Dims, Rule, parse
from autoshard.rules.registry import sharding_rule

aten = torch.ops.aten
autoshard_ops = torch.ops.autoshard

# b batch, h key heads, g query heads for each key head, s queries, t keys, d head size, e value size. Columns m of a
# mask are not split.
_Q, _K, _V, _OUT, _LSE, _PROBABILITIES = parse(
    "b (h g) s d, b h t d, b h t e, b (h g) s e, b (h g) s, b (h g) s m -> scalar"
)[0]
_BLOCKED = ("t", "m", "d", "e")
_RING = (("s", "t"),)
_QUERIES = {kernels.attention: 0, kernels.attention_backward: 1}
"""From an attention operator to the index of the queries among its operands. The keys are the next operand."""
_ROWS = 2
"""The dim of queries and keys that has the tokens."""


@sharding_rule(autoshard_ops.attention.default)
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    seed: torch.Tensor | None,
    *_: Any,
) -> Rule:
    operands = (_Q, _K, _V, *_optional(mask, seed))
    return Rule(
        (operands, (_OUT, _LSE)), sizes=_head_sizes(q, k), blocked=_BLOCKED, together=_RING, whole={"t": (0, 1)},
        local=_local_attention, padding={"t": None},
    )  # fmt: skip


@sharding_rule(autoshard_ops.attention_backward.default)
def attention_backward(
    grad_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None,
    out: torch.Tensor, lse: torch.Tensor, seed: torch.Tensor | None, *_: Any,
) -> Rule:  # fmt: skip
    """Return the rule of the backward of attention. Gradients of keys and values are sums over queries.

    They are also sums over the query heads of a key head.
    """
    operands = (_OUT, _Q, _K, _V, *_optional(mask, None), _OUT, _LSE, *_optional(None, seed))
    return Rule(
        (operands, (_Q, _K, _V)), sizes=_head_sizes(q, k), reduce={"s": "sum", "g": "sum"}, linear=[(0,)],
        blocked=_BLOCKED, together=_RING, whole={"t": (0,)}, local=_local_backward, padding={"t": None},
    )  # fmt: skip


def _optional(mask: torch.Tensor | None, seed: torch.Tensor | None) -> tuple[Dims, ...]:
    mask_dims = () if mask is None else (broadcast_dims(mask.shape, _PROBABILITIES),)
    return (*mask_dims, *(() if seed is None else ((),)))


def _head_sizes(q: torch.Tensor, k: torch.Tensor) -> dict[str, int]:
    return {"h": k.shape[1], "g": q.shape[1] // k.shape[1]}


def _local_attention(context: LocalContext, q: Any, k: Any, v: Any, mask: Any, *rest: Any) -> Any:
    return _call(context, kernels.ring_attention, (q, k, v, mask), rest, mask is None)


def _local_backward(context: LocalContext, grad_out: Any, q: Any, k: Any, v: Any, mask: Any, *rest: Any) -> Any:
    return _call(context, kernels.ring_attention_backward, (grad_out, q, k, v, mask), rest, mask is None)


def _call(context: LocalContext, ring: Any, operands: Sequence[Any], rest: Sequence[Any], is_unmasked: bool) -> Any:
    """Emit attention on a rank's piece, or the ring attention operator `ring` if one axis splits queries and keys.

    `operands` are the arguments up to the mask, which is None if `is_unmasked`. `rest` are the arguments after the
    mask. The last two are the offset in the global matrix of probabilities, and the shape of this matrix.
    """
    *others, offset, global_shape = rest
    batch, heads, queries, _ = context.input_offset(0)  # of q, or of the gradient in q's shape
    placed = shifted(offset, [batch, heads, queries, 0])
    group = context.group("s", "t")
    if group is None:
        return context.default(*operands, *others, placed, global_shape)
    starts, lengths = map(list, zip(*context.pieces("t"), strict=True))
    is_paired = is_unmasked and _may_pair(context, others, offset)
    place = (context.index("t"), starts, lengths, is_paired, group)
    return context.call(ring, *operands, *others, placed, global_shape, *place)


def is_ring(target: Any, inputs: Sequence[PartitionSpec]) -> bool:
    """Whether a call of `target` with operands of these specs is ring attention: some axis splits the keys' tokens."""
    query = _QUERIES.get(target)
    return query is not None and bool(inputs[query + 1].axes_of(_ROWS))


def _may_pair(context: LocalContext, others: Sequence[Any], offset: Sequence[int]) -> bool:
    """Whether each rank of a causal ring can take an early and a late block of the sequence (`is_paired`).

    The ring must be causal, without dropout, with the same tokens as queries and keys. Twice the number of ranks must
    divide the number of tokens. `others` are the arguments between the mask and `offset`, the global index of the first
    score.
    """
    *_, dropout_p, is_causal, _, _ = others
    ranks, length = context.shards("t"), context.global_size("t")
    is_square = (ranks, length) == (context.shards("s"), context.global_size("s")) and not any(offset[2:])
    return is_causal and is_square and not dropout_p and length % (2 * ranks) == 0


@sharding_rule(aten._scaled_dot_product_flash_attention_for_cpu.default)
def cpu_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    *, attn_mask: torch.Tensor | None = None, scale: float | None = None,
) -> Rule | None:  # fmt: skip
    """Return a rule that may split batch and heads.

    Traced attention is `autoshard::attention`. This operator is in a program only if the model calls the operator by
    name.
    """
    if dropout_p or q.shape[1] != k.shape[1]:
        return None
    operands = (_Q, _K, _V, *_optional(attn_mask, None))
    return Rule((operands, (_OUT, _LSE)), sizes=_head_sizes(q, k), blocked=("s", *_BLOCKED))


@sharding_rule(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def cpu_attention_backward(
    grad_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    dropout_p: float, is_causal: bool, *, attn_mask: torch.Tensor | None = None, scale: float | None = None,
) -> Rule | None:  # fmt: skip
    if dropout_p or q.shape[1] != k.shape[1]:
        return None
    operands = (_OUT, _Q, _K, _V, _OUT, _LSE, *_optional(attn_mask, None))
    sizes = _head_sizes(q, k)
    return Rule((operands, (_Q, _K, _V)), sizes=sizes, blocked=("s", *_BLOCKED), linear=[(0,)])
