"""Rules of operators that rearrange elements: `rot90`, `block_diag`, `masked_select`, `put` and others.

The rearranged dims cannot be split. A partial operand gives a partial result, because elements are only moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autoshard.rules.dims import (
    BLOCKED,
    all_blocked,
    broadcast_dims,
    broadcast_shape,
    is_additive,
    joins,
    moves,
    named,
    names,
    normal_dim,
    tensors,
    with_blocked,
)
from autoshard.rules.notation import Dims, Rule
from autoshard.rules.registry import sharding_rule

aten = torch.ops.aten


@sharding_rule(aten.rot90.default)
def quarter_turns(x: torch.Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Rule:
    """Return the rule of `rot90`. Dims that the turns reverse cannot be split.

    An odd number of turns exchanges both dims and reverses one of them. Two turns reverse both dims.
    """
    first, second = (normal_dim(dim, x.dim()) for dim in dims)
    turns = k % 4
    reversed_dims = {0: (), 1: (second,), 2: (first, second), 3: (first,)}[turns]
    source = with_blocked(named(x.dim()), reversed_dims)
    result = list(source)
    if turns % 2:
        result[first], result[second] = result[second], result[first]
    return moves(source, tuple(result))


@sharding_rule(aten.channel_shuffle.default)
def channel_shuffle(x: torch.Tensor, groups: int) -> Rule:
    dims = named(x.dim())
    source, result = (*dims[:1], ("g", "k"), *dims[2:]), (*dims[:1], ("k", "g"), *dims[2:])
    return moves(source, result, sizes={"g": groups}, blocked=("g", "k"))


@sharding_rule(aten.narrow_copy.default)
def narrow_copy(x: torch.Tensor, dim: int, start: int, length: int) -> Rule:
    dims = with_blocked(named(x.dim()), [normal_dim(dim, x.dim())])
    return moves(dims, dims)


@sharding_rule(aten.block_diag.default)
def block_diag(xs: Sequence[torch.Tensor]) -> Rule:
    return joins([all_blocked(x.dim()) for x in xs], all_blocked(2))


@sharding_rule(aten._chunk_cat.default)
def chunk_cat(xs: Sequence[torch.Tensor], dim: int, num_chunks: int) -> Rule:
    """Return a rule that cannot split dims from `dim` on, because the operator flattens, pads and cuts them."""
    before = named(normal_dim(dim, xs[0].dim()))
    operands = [(*before, *all_blocked(x.dim() - len(before))) for x in xs]
    return joins(operands, (*before, BLOCKED, BLOCKED))


@sharding_rule(aten.masked_scatter.default)
def masked_scatter(x: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> Rule:
    """Return a rule that splits no dim, because masked places take elements of the source in the global order."""
    operands = tuple(all_blocked(operand.dim()) for operand in (x, mask, source))
    result = all_blocked(len(broadcast_shape([x.shape, mask.shape])))
    return Rule((operands, (result,)), linear=[(0, 2)])


@sharding_rule(aten.masked_select.default)
def masked_select(x: torch.Tensor, mask: torch.Tensor) -> Rule:
    """Return a rule that splits no dim, because the number of selected elements depends on the mask's values."""
    return Rule(((all_blocked(x.dim()), all_blocked(mask.dim())), (all_blocked(1),)), transparent=True)


@sharding_rule(aten.masked_scatter_backward.default)
def masked_scatter_backward(grad: torch.Tensor, mask: torch.Tensor, sizes: Sequence[int]) -> Rule:
    sides = ((all_blocked(grad.dim()), all_blocked(mask.dim())), (all_blocked(len(sizes)),))
    return Rule(sides, transparent=True)


@sharding_rule(aten.put.default)
def put(x: torch.Tensor, index: torch.Tensor, source: torch.Tensor, accumulate: bool = False) -> Rule:
    target = all_blocked(x.dim())
    if not accumulate or not is_additive(x) or index.shape != source.shape:
        return Rule(((target, all_blocked(index.dim()), all_blocked(source.dim())), (target,)), linear=[(0, 2)])
    places = named(index.dim(), "i")
    reduce = dict.fromkeys(names(places), "sum")
    return Rule(((target, places, places), (target,)), reduce=reduce, added=(0,), linear=[(0, 2)])


@sharding_rule(aten._unsafe_masked_index.default)
def masked_index(
    x: torch.Tensor, mask: torch.Tensor, indices: Sequence[torch.Tensor | None], fill: float
) -> Rule | None:
    places = _places(x, mask, indices)
    if places is None:
        return None
    operands, result = places
    return Rule((operands, (result,)), linear=[(0,)] if fill == 0 else ())


@sharding_rule(aten._unsafe_masked_index_put_accumulate.default)
def masked_index_put(
    x: torch.Tensor, mask: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor
) -> Rule | None:
    places = _places(x, mask, indices)
    if places is None or not is_additive(x):
        return None
    operands, result = places
    sides = ((*operands, broadcast_dims(values.shape, result)), (operands[0],))
    return Rule(sides, reduce=dict.fromkeys(names(result), "sum"), added=(0,), linear=[(0, len(operands))])


def _places(
    x: torch.Tensor, mask: torch.Tensor, indices: Sequence[torch.Tensor | None]
) -> tuple[tuple[Dims, ...], Dims] | None:
    """Return the dims of the operands (`x`, `mask`, then the index tensors), and the dims of the selected elements.

    Mask and indices broadcast to the shape of the selected elements. Return None if some dim of `x` has no index
    tensor.
    """
    present = tensors(*indices)
    if len(present) != x.dim():
        return None
    shapes = [mask.shape, *(index.shape for index in present)]
    places = named(len(broadcast_shape(shapes)), "i")
    return (all_blocked(x.dim()), *(broadcast_dims(shape, places) for shape in shapes)), places


@sharding_rule(aten.max_unpool2d.default, aten.max_unpool3d.default)
def max_unpool(x: torch.Tensor, indices: torch.Tensor, output_size: Sequence[int], *_: Any) -> Rule:
    space = len(output_size)
    dims = (*named(x.dim() - space), *all_blocked(space))
    return Rule(((dims, dims), (dims,)), transparent=True)


@sharding_rule(aten.trace.default)
def trace(x: torch.Tensor) -> Rule:
    return Rule("_ _ -> scalar", linear=[(0,)])
