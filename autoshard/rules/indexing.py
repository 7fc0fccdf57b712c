"""Rules of operators that read or write by index, such as `embedding`, `gather`, `scatter` and `index_put`.

The dims of the index may be split. The indexed dim of some operators may be split too. Then each rank reads the indices
of its own piece, and puts zeros for the indices of other ranks. The results are partial sums.
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
    named,
    names,
    normal_dim,
    tensors,
    with_blocked,
)
from autoshard.rules.local import LocalContext
from autoshard.rules.notation import Dims, Rule
from autoshard.rules.registry import sharding_rule, tensor_operands

aten = torch.ops.aten


def local_indices(context: LocalContext, indices: Any, factor: str) -> tuple[Any, Any]:
    """Emit the conversion of global indices along `factor` to indices into the rank's piece.

    Return the converted indices, and a mask that is True for indices of other ranks. These indices become 0.
    """
    shifted = context.call(aten.sub.Tensor, indices, context.offset(factor))
    too_low = context.call(aten.lt.Scalar, shifted, 0)
    too_high = context.call(aten.ge.Scalar, shifted, context.real_size(factor))
    elsewhere = context.call(aten.bitwise_or.Tensor, too_low, too_high)
    return context.call(aten.masked_fill.Scalar, shifted, elsewhere, 0), elsewhere


# Embeddings: rows of a table.


@sharding_rule(aten.embedding.default)
def embedding(weight: torch.Tensor, indices: torch.Tensor, *_: Any) -> Rule:
    rows = named(indices.dim(), "i")
    sides = (((("v",), ("d",)), rows), ((*rows, ("d",)),))
    return Rule(sides, reduce={"v": "sum"}, linear=[(0,)], local=_local_embedding, padding={"v": None})


def _local_embedding(context: LocalContext, weight: Any, indices: Any, *rest: Any) -> Any:
    if not context.is_split("v"):
        return context.default(weight, indices, *rest)
    local, elsewhere = local_indices(context, indices, "v")
    rows = context.default(weight, local)
    return context.call(aten.masked_fill.Scalar, rows, context.call(aten.unsqueeze.default, elsewhere, -1), 0)


@sharding_rule(aten.embedding_dense_backward.default)
def embedding_backward(
    grad: torch.Tensor, indices: torch.Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Rule:
    rows = named(indices.dim(), "i")
    sides = (((*rows, ("d",)), rows), ((("v",), ("d",)),))
    blocked = ("v", *names(rows)) if scale_grad_by_freq else ()  # the scale counts all occurrences of a row
    reduce = dict.fromkeys(names(rows), "sum")
    return Rule(sides, reduce=reduce, linear=[(0,)], blocked=blocked, local=_local_embedding_backward, padding={})


def _local_embedding_backward(
    context: LocalContext,
    grad: Any,
    indices: Any,
    num_weights: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> Any:
    """Emit the gradient of the rank's rows of the table.

    Indices of other ranks, and indices equal to `padding_idx`, add zero to row 0.
    """
    if not context.is_split("v"):
        return context.default(grad, indices, num_weights, padding_idx, scale_grad_by_freq)
    local, skipped = local_indices(context, indices, "v")
    if padding_idx >= 0:
        is_padding = context.call(aten.eq.Scalar, indices, padding_idx)
        skipped = context.call(aten.bitwise_or.Tensor, skipped, is_padding)
    grad = context.call(aten.masked_fill.Scalar, grad, context.call(aten.unsqueeze.default, skipped, -1), 0)
    return context.default(grad, local, context.local_size("v"), -1, scale_grad_by_freq)


# One index tensor, along one dim.


@sharding_rule(aten.index_select.default)
def index_select(x: torch.Tensor, dim: int, index: torch.Tensor) -> Rule | None:
    if x.dim() == 0:
        return Rule((((), all_blocked(index.dim())), ((),)), transparent=True)
    dims, position = named(x.dim()), normal_dim(dim, x.dim())
    result = (*dims[:position], ("i",), *dims[position + 1 :])

    def local(context: LocalContext, x: Any, dim: int, index: Any) -> Any:
        if not context.is_split(factor):
            return context.default(x, dim, index)
        local, elsewhere = local_indices(context, index, factor)
        shape = [1] * position + [context.local_size("i")] + [1] * (len(dims) - 1 - position)
        mask = context.call(aten.reshape.default, elsewhere, shape)
        return context.call(aten.masked_fill.Scalar, context.default(x, dim, local), mask, 0)

    (factor,) = dims[position]
    index_dims = (("i",),) if index.dim() else ()
    reduce = {factor: "sum"}
    return Rule(
        ((dims, index_dims), (result,)),
        reduce=reduce,
        linear=[(0,)],
        blocked=_unless_additive(x, factor),
        local=local,
        padding={factor: None},
    )


@sharding_rule(aten.index_add.default)
def index_add(x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, **kwargs: Any) -> Rule | None:
    if x.dim() == 0 or source.dim() == 0:
        return _written(x, index, source)
    dims, position = named(x.dim()), normal_dim(dim, x.dim())
    target = with_blocked(dims, [position])
    source_dims = (*dims[:position], ("i",), *dims[position + 1 :])
    index_dims = (("i",),) if index.dim() else ()
    sides = ((target, index_dims, source_dims), (target,))
    return Rule(sides, reduce={"i": "sum"}, added=(0,), linear=[(0, 2)])


@sharding_rule(aten.index_copy.default)
def index_copy(x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> Rule | None:
    if x.dim() == 0 or source.dim() == 0:
        return _written(x, index, source)
    dims = with_blocked(named(x.dim()), [normal_dim(dim, x.dim())])
    return Rule(((dims, all_blocked(index.dim()), dims), (dims,)), linear=[(0, 2)])


@sharding_rule(aten.index_fill.int_Tensor)
def index_fill_tensor(x: torch.Tensor, dim: int, index: torch.Tensor, value: torch.Tensor) -> Rule | None:
    if x.dim() == 0:
        return _written(x, index, value)
    dims = with_blocked(named(x.dim()), [normal_dim(dim, x.dim())])
    return Rule(((dims, all_blocked(index.dim()), ()), (dims,)), linear=[(0, 2)])


@sharding_rule(aten.index_fill.int_Scalar)
def index_fill(x: torch.Tensor, dim: int, index: torch.Tensor, value: float) -> Rule | None:
    if x.dim() == 0:
        return None
    dims = with_blocked(named(x.dim()), [normal_dim(dim, x.dim())])
    linear = [(0,)] if value == 0 else ()
    return Rule(((dims, all_blocked(index.dim())), (dims,)), linear=linear)


def _whole(operands: Sequence[torch.Tensor]) -> tuple[tuple[Dims, ...], tuple[Dims, ...]]:
    """Return dims of operands and result that cannot be split. The result has the dims of the first operand."""
    dims = tuple(all_blocked(operand.dim()) for operand in operands)
    return dims, dims[:1]


def _written(x: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> Rule:
    """Return the rule of a call that replaces elements of `x` by elements of `source`. No dim may be split."""
    return Rule(_whole([x, index, source]), linear=[(0, 2)])


# An index of the result's shape, along one dim.


@sharding_rule(aten.gather.default)
def gather(x: torch.Tensor, dim: int, index: torch.Tensor, *, sparse_grad: bool = False) -> Rule | None:
    if x.dim() == 0 or index.dim() != x.dim():
        return Rule(((all_blocked(x.dim()), all_blocked(index.dim())), (all_blocked(index.dim()),)), transparent=True)
    position = normal_dim(dim, x.dim())
    source, index_dims = _aligned(x.shape, index.shape, position)

    def local(context: LocalContext, x: Any, dim: int, index: Any, **kwargs: Any) -> Any:
        if not context.is_split("v"):
            return context.default(x, dim, index, **kwargs)
        local, elsewhere = local_indices(context, index, "v")
        return context.call(aten.masked_fill.Scalar, context.default(x, dim, local, **kwargs), elsewhere, 0)

    sides = ((source, index_dims), (index_dims,))
    return Rule(
        sides,
        reduce={"v": "sum"},
        linear=[(0,)],
        blocked=_unless_additive(x, "v"),
        local=local,
        padding={"v": None},
    )


def _aligned(shape: Sequence[int], index_shape: Sequence[int], position: int) -> tuple[Dims, Dims]:
    """Return the dims of an operand and of its index tensor, which selects along dim `position`.

    In this dim, the operand has the factor `v`, and the index has `i`. Each other dim has one factor in both tensors if
    the sizes agree, and cannot be split otherwise.
    """
    dims = named(len(shape))
    shared = [size == other for size, other in zip(shape, index_shape, strict=True)]
    others = with_blocked(dims, [dim for dim, is_shared in enumerate(shared) if not is_shared])
    before, after = others[:position], others[position + 1 :]
    return (*before, ("v",), *after), (*before, ("i",), *after)


def _unless_additive(x: torch.Tensor, *factors: str) -> tuple[str, ...]:
    return () if is_additive(x) else factors


@sharding_rule(aten.scatter.src)
def scatter(x: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor) -> Rule | None:
    rule_dims = _scattered(x, dim, index, src)
    return rule_dims and Rule(rule_dims, linear=[(0, 2)], blocked=("i",))


@sharding_rule(aten.scatter.value)
def scatter_value(x: torch.Tensor, dim: int, index: torch.Tensor, value: float) -> Rule | None:
    rule_dims = _scattered(x, dim, index)
    linear = [(0,)] if value == 0 else ()
    return rule_dims and Rule(rule_dims, linear=linear, blocked=("i",))


@sharding_rule(aten.scatter_add.default)
def scatter_add(x: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor) -> Rule | None:
    rule_dims = _scattered(x, dim, index, src)
    if rule_dims is None or not is_additive(x):
        return None
    return Rule(rule_dims, reduce={"i": "sum"}, added=(0,), linear=[(0, 2)])


@sharding_rule(aten.scatter_reduce.two)
def scatter_reduce(
    x: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    src: torch.Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> Rule | None:
    rule_dims = _scattered(x, dim, index, src)
    if rule_dims is None or not is_additive(x):
        return None
    return _reducing(rule_dims, x, reduce, include_self)


def _reducing(
    sides: tuple[tuple[Dims, ...], tuple[Dims, ...]], x: torch.Tensor, reduce: str, include_self: bool
) -> Rule:
    """Return the rule of an operator that reduces elements of operand 2 into operand 0, `x`, such as `scatter_reduce`.

    `sides` has the dims of operands and results. The indices have the factor `i`. `reduce` is "sum", "mean", "prod",
    "amax" or "amin". `i` may be split if the reduction includes the old elements of `x` (`include_self`). A mean needs
    all elements, so `i` is not split.
    """
    is_sum = reduce == "sum" or (reduce == "mean" and x.is_floating_point())  # means of integers round
    linear = [(0, 2)] if is_sum else []
    reduction = {"sum": "sum", "prod": "product", "amax": "max", "amin": "min"}.get(reduce)
    if reduction is None or not include_self:
        return Rule(sides, blocked=("i",), linear=linear)
    return Rule(sides, reduce={"i": reduction}, added=(0,), linear=linear)


@sharding_rule(aten.index_reduce.default)
def index_reduce(
    x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, reduce: str, *, include_self: bool = True
) -> Rule | None:
    if x.dim() == 0 or source.dim() == 0:
        return _reducing(_whole([x, index, source]), x, reduce, include_self)
    dims, position = named(x.dim()), normal_dim(dim, x.dim())
    target, moved = with_blocked(dims, [position]), (*dims[:position], ("i",), *dims[position + 1 :])
    sides = ((target, (("i",),) if index.dim() else (), moved), (target,))
    return _reducing(sides, x, reduce, include_self)


def _scattered(
    x: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor | None = None
) -> tuple[tuple[Dims, ...], tuple[Dims, ...]] | None:
    """Return the dims of operands and result of operators like `scatter`, which write along dim `dim` of `x`.

    This dim of `x` cannot be split. In this dim, `index` and `src` have the factor `i` if their sizes agree.
    """
    if x.dim() == 0 or any(t is not None and t.dim() != x.dim() for t in (index, src)):
        return _whole(tensors(x, index, src))
    position = normal_dim(dim, x.dim())
    shapes = [index.shape] if src is None else [index.shape, src.shape]
    shared = [all(shape[d] == x.shape[d] for shape in shapes) for d in range(x.dim())]
    target = with_blocked(named(x.dim()), [d for d in range(x.dim()) if d == position or not shared[d]])
    along = ("i",) if all(shape[position] == index.shape[position] for shape in shapes) else BLOCKED
    moved = (*target[:position], along, *target[position + 1 :])
    return ((target, *[moved] * len(shapes)), (target,))


# Index tensors for several dims, broadcast to each other.


@sharding_rule(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(x: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> Rule | None:
    dims = _indexed(x, indices)
    if dims is None:
        return None
    source, index_dims, result = dims
    return Rule(((source, *index_dims), (result,)), transparent=True)


@sharding_rule(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(
    x: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor, accumulate: bool = False
) -> Rule | None:
    dims = _indexed(x, indices)
    if dims is None:
        return None
    target, index_dims, selected = dims
    sides = ((target, *index_dims, broadcast_dims(values.shape, selected)), (target,))
    linear = [(0, len(index_dims) + 1)]
    of_index = {factor for operand in index_dims for factor in names(operand)}  # masks have none
    if not accumulate or not is_additive(x):
        return Rule(sides, linear=linear, blocked=of_index)
    return Rule(sides, linear=linear, reduce=dict.fromkeys(of_index, "sum"), added=(0,))


def _indexed(x: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> tuple[Dims, tuple[Dims, ...], Dims] | None:
    """Return the dims of the operand, of each index tensor, and of the selected elements. Return None without an index.

    A mask stands for one vector of indices for each of its dims. The vectors' length depends on the mask's values.
    """
    tensors = [index for index in indices if index is not None]
    if not tensors:
        return None
    has_mask = any(map(_is_mask, tensors))
    present = _indexed_dims(indices)
    shape = broadcast_shape([(1,) if _is_mask(index) else index.shape for index in tensors])
    of_index = all_blocked(len(shape)) if has_mask else named(len(shape), "i")
    source = with_blocked(named(x.dim()), present)
    kept = [source[dim] for dim in range(x.dim()) if dim not in present]
    is_adjacent = present == list(range(present[0], present[-1] + 1))
    before = present[0] if is_adjacent else 0
    of_each = (all_blocked(index.dim()) if has_mask else broadcast_dims(index.shape, of_index) for index in tensors)
    return source, tuple(of_each), (*kept[:before], *of_index, *kept[before:])


def _is_mask(index: torch.Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


def _indexed_dims(indices: Sequence[torch.Tensor | None]) -> list[int]:
    """Return the dims of the operand that `indices` select from, ascending.

    A tensor of integers selects from one dim. A mask selects from as many dims as it has.
    """
    found: list[int] = []
    dim = 0
    for index in indices:
        width = index.dim() if index is not None and _is_mask(index) else 1
        found += range(dim, dim + width) if index is not None else ()
        dim += width
    return found


@sharding_rule(aten.take.default)
def take(x: torch.Tensor, index: torch.Tensor) -> Rule:
    dims = named(index.dim(), "i")
    return Rule(((all_blocked(x.dim()), dims), (dims,)), transparent=True)


# Bags: sums of rows of a table.


@sharding_rule(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def embedding_bag(
    weight: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor, scale_grad_by_freq: bool = False, mode: int = 0,
    sparse: bool = False, per_sample_weights: torch.Tensor | None = None, *_: Any,
) -> Rule | None:  # fmt: skip
    """Return a rule that may split columns of the table.

    The last result of a maximum (mode 2) has the row of each column's maximum, so it is split with the columns.
    """
    columns = (BLOCKED, ("d",))
    others = ((BLOCKED,),) * (2 if per_sample_weights is None else 3)
    rows = (columns, (1, 2)) if mode == 2 else ((BLOCKED,), (1, 2, 3))
    return Rule(((columns, *others), (columns, (BLOCKED,), (BLOCKED,), rows[0])), whole={"d": rows[1]}, linear=())


@sharding_rule(aten._embedding_bag_backward.default, aten._embedding_bag_dense_backward.default)
def embedding_bag_backward(grad: torch.Tensor, *args: Any, **kwargs: Any) -> Rule:
    """Return a rule that may split columns of the table.

    For maxima, an operand has the row of each column's maximum, and is split with the columns.
    """
    result = (BLOCKED, ("d",))
    others = (result if x.dim() == 2 else all_blocked(x.dim()) for x in tensor_operands(args, kwargs))
    return Rule(((result, *others), (result,)), linear=[(0,)])
