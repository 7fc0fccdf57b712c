"""Rules of operators that only move elements, such as `view`, `permute`, `slice`, `cat` and `pad`.

Partial sums pass through one operand (`transparent`), or through several operands together. Zeros that the operator
inserts are harmless, because they add up to zero. Dims that are cut, shifted or joined cannot be split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from autoshard.rules.dims import (
    BLOCKED,
    ONE,
    all_blocked,
    joins,
    moves,
    named,
    normal_dim,
    normal_dims,
    with_blocked,
    without,
)
from autoshard.rules.local import LocalContext
from autoshard.rules.notation import Dims, OperandCondition, Rule
from autoshard.rules.registry import sharding_rule

aten = torch.ops.aten


# Shapes: dims split and merged.


@sharding_rule(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.view_copy.default)
def view(x: torch.Tensor, size: Sequence[int]) -> Rule | None:
    return _reshape(x, _infer_size(x, size), _local_view)


@sharding_rule(aten._reshape_alias.default)
def reshape_alias(x: torch.Tensor, size: Sequence[int], stride: Sequence[int]) -> Rule | None:
    return _reshape(x, size, _local_view)


@sharding_rule(aten.as_strided.default, aten.as_strided_copy.default)
def as_strided(x: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Rule | None:
    """Return the rule of `as_strided`. Dims may be split only if the call is a reshape of contiguous memory."""
    is_plain = x.is_contiguous() and x.numel() == math.prod(size) and list(stride) == _contiguous_stride(size)
    whole = moves(all_blocked(x.dim()), all_blocked(len(size)))
    return (_reshape(x, size, _local_view) or whole) if is_plain and not offset else whole


@sharding_rule(aten.flatten.using_ints)
def flatten(x: torch.Tensor, start_dim: int = 0, end_dim: int = -1) -> Rule | None:
    start, end = normal_dim(start_dim, x.dim()), normal_dim(end_dim, x.dim())
    return _reshape(x, (*x.shape[:start], math.prod(x.shape[start : end + 1]), *x.shape[end + 1 :]), None)


@sharding_rule(aten.view.dtype)
def view_dtype(x: torch.Tensor, dtype: torch.dtype) -> Rule | None:
    """Return the rule of a view in another dtype, or None if element sizes differ.

    A partial sum does not pass, because the bits of addends do not add up.
    """
    dims = named(x.dim())
    return Rule(((dims,), (dims,))) if dtype.itemsize == x.dtype.itemsize else None


def _local_view(context: LocalContext, x: Any, *_: Any) -> Any:
    """Emit a reshape to the local shape. A view could fail on the strides of a local piece."""
    return context.call(aten.reshape.default, x, context.output_shape())


def _reshape(x: torch.Tensor, size: Sequence[int], local: Callable[..., Any] | None) -> Rule | None:
    if x.numel() == 0:
        return None
    source, result, sizes = common_factors(x.shape, size)
    return moves(
        source,
        result,
        sizes=sizes,
        blocked=[name for name in sizes if name.startswith("rest")],
        local=local,
        padding={},
    )


def _infer_size(x: torch.Tensor, size: Sequence[int]) -> tuple[int, ...]:
    known = -math.prod(size) if -1 in size else 1
    return tuple(x.numel() // known if entry == -1 else entry for entry in size)


def _contiguous_stride(size: Sequence[int]) -> list[int]:
    return [math.prod(size[dim + 1 :]) for dim in range(len(size))]


def common_factors(source: Sequence[int], result: Sequence[int]) -> tuple[Dims, Dims, dict[str, int]]:
    """Return the dims of two shapes of one tensor as products of common factors, and the size of each factor by name.

    1. Walk both shapes from the major end. Each side has a remainder of its current dim.
    2. The greatest common divisor of both remainders is a factor of both dims. When a dim is used up, go to the next.
    3. If neither dim is used up, no common factor describes the dims until the products of both sides are equal. These
       dims get factors `rest...` of their own, which cannot be split.

    Example:
        >>> common_factors([6, 4], [2, 12])
        ((('f0', 'f1'), ('f2',)), (('f0',), ('f1', 'f2')), {'f0': 2, 'f1': 3, 'f2': 4})
    """
    sides = (_Side(source, "restA"), _Side(result, "restB"))
    sizes: dict[str, int] = {}
    while not any(side.is_done for side in sides):
        left = [side.left for side in sides]
        common = math.gcd(*left)
        if common > 1:
            name = f"f{len(sizes)}"
            sizes[name] = common
            for side in sides:
                side.take(name, common)
        if common not in left:
            _skip_to_meeting(sides, sizes)
    return sides[0].dims, sides[1].dims, sizes


class _Side:
    """A shape while its factors are being found: the factors of each dim so far, and the rest of the current dim."""

    def __init__(self, shape: Sequence[int], rest: str) -> None:
        self._shape = shape
        self._factors: list[tuple[str, ...]] = [() for _ in shape]
        self._rest = rest
        self._dim = -1
        self.left = 1
        self._advance()

    @property
    def is_done(self) -> bool:
        return self._dim == len(self._shape)

    @property
    def dims(self) -> Dims:
        return tuple(self._factors)

    def take(self, name: str, size: int) -> None:
        self._factors[self._dim] += (name,)
        self.left //= size
        self._advance()

    def take_rest(self, sizes: dict[str, int]) -> int:
        """Make the remainder of the current dim a factor of its own, write its size into `sizes`, and return it."""
        size, name = self.left, f"{self._rest}{len(sizes)}"
        sizes[name] = size
        self.take(name, size)
        return size

    def _advance(self) -> None:
        while self.left == 1 and not self.is_done:
            self._dim += 1
            self.left = 1 if self.is_done else self._shape[self._dim]


def _skip_to_meeting(sides: tuple[_Side, _Side], sizes: dict[str, int]) -> None:
    """Give both shapes factors `rest...` of their own until these cover the same number of elements on both sides."""
    covered = [side.take_rest(sizes) for side in sides]
    while covered[0] != covered[1]:
        behind = 0 if covered[0] < covered[1] else 1
        covered[behind] *= sides[behind].take_rest(sizes)


# Orders of dims.


@sharding_rule(aten.t.default, aten.t_copy.default)
def t(x: torch.Tensor) -> Rule:
    return moves(named(x.dim()), named(x.dim())[::-1])


@sharding_rule(aten.transpose.int, aten.transpose_copy.int)
def transpose(x: torch.Tensor, dim0: int, dim1: int) -> Rule:
    order = list(range(x.dim()))
    if order:
        order[dim0], order[dim1] = order[dim1], order[dim0]
    return _reorder(x, order)


@sharding_rule(aten.permute.default, aten.permute_copy.default)
def permute(x: torch.Tensor, dims: Sequence[int]) -> Rule:
    return _reorder(x, [normal_dim(dim, x.dim()) for dim in dims])


@sharding_rule(aten.movedim.int)
def movedim(x: torch.Tensor, source: int, destination: int) -> Rule:
    order = [dim for dim in range(x.dim()) if dim != normal_dim(source, x.dim())]
    order.insert(normal_dim(destination, x.dim()), normal_dim(source, x.dim()))
    return _reorder(x, order)


@sharding_rule(aten.mT.default, aten.mH.default, aten.adjoint.default)
def matrix_transpose(x: torch.Tensor) -> Rule:
    return _reorder(x, [*range(x.dim() - 2), x.dim() - 1, x.dim() - 2])


def _reorder(x: torch.Tensor, order: Sequence[int]) -> Rule:
    dims = named(x.dim())
    return moves(dims, tuple(dims[dim] for dim in order))


# Dims of size one, and repetitions.


@sharding_rule(aten.unsqueeze.default, aten.unsqueeze_copy.default)
def unsqueeze(x: torch.Tensor, dim: int) -> Rule:
    dims = named(x.dim())
    position = normal_dim(dim, x.dim() + 1)
    return moves(dims, (*dims[:position], ONE, *dims[position:]))


@sharding_rule(aten.squeeze.default, aten.squeeze_copy.default)
def squeeze(x: torch.Tensor) -> Rule:
    return _squeeze(x, range(x.dim()))


@sharding_rule(aten.squeeze.dim, aten.squeeze.dims, aten.squeeze_copy.dim, aten.squeeze_copy.dims)
def squeeze_dims(x: torch.Tensor, dim: int | Sequence[int]) -> Rule:
    listed = [dim] if isinstance(dim, int) else dim
    return _squeeze(x, [normal_dim(entry, x.dim()) for entry in listed])


def _squeeze(x: torch.Tensor, removed: Sequence[int]) -> Rule:
    """Return the rule of an operator that removes those dims of `removed` that have size one.

    The rewrite reshapes to the local shape, because a piece may have size one in other dims.
    """
    dims = named(x.dim())
    gone = [dim for dim in removed if dim < x.dim() and x.shape[dim] == 1]
    return moves(dims, without(dims, gone), local=_local_view, padding={})


@sharding_rule(aten.expand.default, aten.expand_copy.default)
def expand(x: torch.Tensor, size: Sequence[int], *, implicit: bool = False) -> Rule:
    new = len(size) - x.dim()
    result = named(len(size))
    source = tuple(
        ONE if entry == 1 and size[new + dim] != 1 else result[new + dim] for dim, entry in enumerate(x.shape)
    )
    return moves(source, result, local=_local_expand, padding={})


def _local_expand(context: LocalContext, x: Any, *_: Any, **__: Any) -> Any:
    return context.call(aten.expand.default, x, context.output_shape())


@sharding_rule(aten.repeat.default)
def repeat(x: torch.Tensor, repeats: Sequence[int]) -> Rule | None:
    """Return the rule of `repeat`. A dim of the result is copies (major) times elements (minor).

    So ranks may split the elements of a dim only if each rank has one copy.
    """
    if 0 in repeats or x.numel() == 0:
        return None
    new = len(repeats) - x.dim()
    source = named(x.dim())
    result = tuple((f"r{dim}", *(source[dim - new] if dim >= new else ())) for dim in range(len(repeats)))
    sizes = {f"r{dim}": count for dim, count in enumerate(repeats)}
    return moves(source, result, sizes=sizes, local=_local_repeat, padding={})


def _local_repeat(context: LocalContext, x: Any, repeats: Sequence[int]) -> Any:
    local = [context.local_size(f"r{dim}") if count > 1 else count for dim, count in enumerate(repeats)]
    return context.call(aten.repeat.default, x, local)


# Cuts.


@sharding_rule(aten.slice.Tensor, aten.slice_copy.Tensor)
def slice_tensor(
    x: torch.Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Rule:
    position = normal_dim(dim, x.dim())
    cut = () if _is_whole(x.shape[position], start, end, step) else (position,)
    dims = with_blocked(named(x.dim()), cut)
    return moves(dims, dims)


@sharding_rule(aten.slice_backward.default)
def slice_backward(grad: torch.Tensor, sizes: Sequence[int], dim: int, start: int, end: int, step: int) -> Rule:
    position = normal_dim(dim, grad.dim())
    cut = () if _is_whole(sizes[position], start, end, step) else (position,)
    dims = with_blocked(named(grad.dim()), cut)
    return moves(dims, dims, local=_local_backward, padding={})


@sharding_rule(aten.slice_scatter.default)
def slice_scatter(x: torch.Tensor, source: torch.Tensor, dim: int = 0, *_: Any) -> Rule:
    dims = with_blocked(named(x.dim()), [normal_dim(dim, x.dim())])
    return joins([dims, dims], dims)


def _is_whole(size: int, start: int | None, end: int | None, step: int) -> bool:
    return step == 1 and (start or 0) in (0, -size) and (end is None or end >= size)


@sharding_rule(aten.select.int, aten.select_copy.int)
def select(x: torch.Tensor, dim: int, index: int) -> Rule:
    dims = with_blocked(named(x.dim()), [position := normal_dim(dim, x.dim())])
    return moves(dims, without(dims, [position]))


@sharding_rule(aten.select_backward.default)
def select_backward(grad: torch.Tensor, sizes: Sequence[int], dim: int, index: int) -> Rule:
    dims = with_blocked(named(len(sizes)), [position := normal_dim(dim, len(sizes))])
    return moves(without(dims, [position]), dims, local=_local_backward, padding={})


@sharding_rule(aten.select_scatter.default)
def select_scatter(x: torch.Tensor, source: torch.Tensor, dim: int, index: int) -> Rule:
    dims = with_blocked(named(x.dim()), [position := normal_dim(dim, x.dim())])
    return joins([dims, without(dims, [position])], dims)


def _local_backward(context: LocalContext, grad: Any, sizes: Sequence[int], *rest: Any) -> Any:
    return context.default(grad, context.output_shape(), *rest)


@sharding_rule(aten.split.Tensor, aten.unsafe_split.Tensor, aten.split_copy.Tensor)
def split(x: torch.Tensor, split_size: int, dim: int = 0) -> Rule:
    return _pieces(x, dim, max(1, -(-x.shape[dim] // max(split_size, 1))))


@sharding_rule(aten.split_with_sizes.default, aten.unsafe_split_with_sizes.default, aten.split_with_sizes_copy.default)
def split_with_sizes(x: torch.Tensor, split_sizes: Sequence[int], dim: int = 0) -> Rule:
    return _pieces(x, dim, len(split_sizes))


@sharding_rule(aten.chunk.default, aten.unsafe_chunk.default)
def chunk(x: torch.Tensor, chunks: int, dim: int = 0) -> Rule:
    size = x.shape[dim]
    return _pieces(x, dim, -(-size // -(-size // chunks)) if size else chunks)


def _pieces(x: torch.Tensor, dim: int, count: int) -> Rule:
    dims = with_blocked(named(x.dim()), [normal_dim(dim, x.dim())])
    return Rule(((dims,), (dims,) * count), transparent=True)


@sharding_rule(aten.unbind.int, aten.unbind_copy.int)
def unbind(x: torch.Tensor, dim: int = 0) -> Rule:
    dims = with_blocked(named(x.dim()), [position := normal_dim(dim, x.dim())])
    return Rule(((dims,), (without(dims, [position]),) * x.shape[position]), transparent=True)


@sharding_rule(aten.diagonal.default, aten.diagonal_copy.default)
def diagonal(x: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Rule:
    dims = with_blocked(named(x.dim()), pair := normal_dims([dim1, dim2], x.dim()))
    return moves(dims, (*without(dims, pair), BLOCKED))


@sharding_rule(aten.diagonal_scatter.default)
def diagonal_scatter(x: torch.Tensor, source: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Rule:
    dims = with_blocked(named(x.dim()), pair := normal_dims([dim1, dim2], x.dim()))
    return joins([dims, (*without(dims, pair), BLOCKED)], dims)


@sharding_rule(aten.diag_embed.default)
def diag_embed(x: torch.Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Rule:
    dims, (first, second) = named(x.dim() - 1), sorted(normal_dims([dim1, dim2], x.dim() + 1))
    result = list(dims)
    result.insert(first, BLOCKED)
    result.insert(second, BLOCKED)
    return moves((*dims, BLOCKED), tuple(result))


@sharding_rule(aten.diagonal_backward.default)
def diagonal_backward(grad: torch.Tensor, sizes: Sequence[int], offset: int, dim1: int, dim2: int) -> Rule:
    dims = with_blocked(named(len(sizes)), pair := normal_dims([dim1, dim2], len(sizes)))
    return moves((*without(dims, pair), BLOCKED), dims, local=_local_backward, padding={})


@sharding_rule(aten.unfold.default, aten.unfold_copy.default)
def unfold(x: torch.Tensor, dim: int, size: int, step: int) -> Rule:
    dims = with_blocked(named(x.dim()), [normal_dim(dim, x.dim())]) if x.dim() else ()
    return moves(dims, (*dims, BLOCKED))


@sharding_rule(aten.unfold_backward.default)
def unfold_backward(grad: torch.Tensor, sizes: Sequence[int], dim: int, size: int, step: int) -> Rule:
    dims = with_blocked(named(len(sizes)), [normal_dim(dim, len(sizes))]) if sizes else ()
    return Rule((((*dims, BLOCKED),), (dims,)), linear=[(0,)], local=_local_backward, padding={})


# Joins.


@sharding_rule(aten.cat.default)
def cat(xs: Sequence[torch.Tensor], dim: int = 0) -> Rule:
    """Return the rule of a concatenation along `dim`, which cannot be split.

    Some of the operands `xs` may be empty vectors, which `cat` ignores.
    """
    ndim = max(x.dim() for x in xs)
    dims = with_blocked(named(ndim), [normal_dim(dim, ndim)])
    operands = tuple(dims if x.dim() == ndim else all_blocked(x.dim()) for x in xs)
    return joins(operands, dims)


@sharding_rule(aten.stack.default)
def stack(xs: Sequence[torch.Tensor], dim: int = 0) -> Rule:
    dims = named(xs[0].dim())
    position = normal_dim(dim, len(dims) + 1)
    return joins([dims] * len(xs), (*dims[:position], BLOCKED, *dims[position:]))


# Rearrangements within a dim.


@sharding_rule(aten.constant_pad_nd.default)
def constant_pad_nd(x: torch.Tensor, pad: Sequence[int], value: float = 0) -> Rule:
    dims = _padded(x, pad)
    return Rule(((dims,), (dims,)), transparent=value == 0)


def _padded(x: torch.Tensor, pad: Sequence[int]) -> Dims:
    """Return the dims of `x`. Dims that are padded cannot be split.

    `pad` has the numbers of elements (before, after) for each dim, from the last dim on.
    """
    changed = [x.dim() - 1 - index // 2 for index, amount in enumerate(pad) if amount]
    return with_blocked(named(x.dim()), changed)


@sharding_rule(
    aten.reflection_pad1d.default,
    aten.reflection_pad2d.default,
    aten.reflection_pad3d.default,
    aten.replication_pad1d.default,
    aten.replication_pad2d.default,
    aten.replication_pad3d.default,
)
def pad_copying(x: torch.Tensor, padding: Sequence[int]) -> Rule:
    dims = _padded(x, padding)
    return moves(dims, dims)


@sharding_rule(
    aten.reflection_pad1d_backward.default,
    aten.reflection_pad2d_backward.default,
    aten.reflection_pad3d_backward.default,
    aten.replication_pad1d_backward.default,
    aten.replication_pad2d_backward.default,
    aten.replication_pad3d_backward.default,
)
def pad_copying_backward(grad: torch.Tensor, x: torch.Tensor, padding: Sequence[int]) -> Rule:
    dims = _padded(x, padding)
    return Rule(((dims, dims), (dims,)), linear=[(0,)], beside={1: OperandCondition.ANYTHING})


@sharding_rule(aten.flip.default)
def flip(x: torch.Tensor, dims: Sequence[int]) -> Rule:
    kept = with_blocked(named(x.dim()), [normal_dim(dim, x.dim()) for dim in dims])
    return moves(kept, kept)


@sharding_rule(aten.roll.default)
def roll(x: torch.Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Rule:
    kept = with_blocked(named(x.dim()), normal_dims(dims, x.dim()))
    return moves(kept, kept)


@sharding_rule(aten.view_as_real.default)
def view_as_real(x: torch.Tensor) -> Rule:
    dims = named(x.dim())
    return Rule(((dims,), ((*dims, BLOCKED),)), linear=[(0,)])


@sharding_rule(aten.view_as_complex.default)
def view_as_complex(x: torch.Tensor) -> Rule:
    dims = named(x.dim() - 1)
    return Rule((((*dims, BLOCKED),), (dims,)), linear=[(0,)])


@sharding_rule(aten.tril.default, aten.triu.default)
def triangle(x: torch.Tensor, diagonal: int = 0) -> Rule:
    dims = named(x.dim())
    return moves(dims, dims, local=_local_triangle, padding={})


def _local_triangle(context: LocalContext, x: Any, diagonal: int = 0) -> Any:
    """Emit `tril` or `triu` on the piece, with the diagonal moved by the global row and column of its first element."""
    *_, row, column = context.output_offset()
    return context.default(x, diagonal + row - column)
