"""Rules of pooling. Batch and channels may be split, and spatial dims may be split with halos (`autoshard.rules.halo`).

A spatial dim of adaptive pooling may be split if all windows have one size. Backwards are linear in the gradient.
Averages are also linear in the operand.

A *plane* is the spatial dims of one channel. The indices that max pooling returns count the elements of the whole
plane, without padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from autoshard.ir.reduction import identity_of
from autoshard.ir.spec import Reduction
from autoshard.rules.dims import named
from autoshard.rules.halo import (
    Halo,
    HaloWindow,
    each,
    exchanged,
    extend_all,
    fold_all,
    inner_padding,
    sliding,
    split_halos,
    stride_factors,
    window_factors,
)
from autoshard.rules.local import LocalContext
from autoshard.rules.notation import Dims, OperandCondition, Rule
from autoshard.rules.registry import sharding_rule

aten = torch.ops.aten

_LINEAR = ((0,),)
_BACKWARD: Mapping[str, Any] = MappingProxyType({"linear": _LINEAR, "beside": {1: OperandCondition.ANYTHING}})
"""Fields of the rules of backwards: they are linear in the gradient, and read only the shape of the operand."""

Ints = int | Sequence[int]


def _rule(x: torch.Tensor, windows: Sequence[HaloWindow], operands: str, results: str, **options: Any) -> Rule:
    """Return the rule of a pooling operator, whose tensors have spatial dims of elements or of windows.

    Args:
        x: the operand of the forward.
        windows: the windows along each spatial dim.
        operands, results: a letter for each tensor: "x" if its spatial dims have elements, "y" if they have windows.
        options: further fields of the rule.
    """
    batch = named(x.dim() - len(windows))
    dims: dict[str, Dims] = {
        "x": (*batch, *(window.elements for window in windows)),
        "y": (*batch, *(window.windows for window in windows)),
    }
    return Rule(
        (tuple(dims[name] for name in operands), tuple(dims[name] for name in results)),
        sizes=stride_factors(windows),
        blocked=tuple(stride_factors(windows)),
        exchanged=exchanged(_halos(windows)),
        padding={},
        even=window_factors(windows),
        **options,
    )


def _halos(windows: Iterable[HaloWindow]) -> list[Halo]:
    return [window.halo for window in windows if window.fits]


def _windows(
    x: torch.Tensor, space: int, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints, ceil_mode: bool
) -> tuple[HaloWindow, ...]:
    """Return the windows of each spatial dim. With `ceil_mode`, the last window may reach beyond the padding's end."""
    first = x.dim() - space
    options = [each(option, space) for option in (kernel, stride or kernel, padding, dilation)]
    counts = [_count(*row, ceil_mode=ceil_mode) for row in zip(x.shape[first:], *options, strict=True)]
    return sliding(x.shape[first:], counts, *options)


def _count(size: int, kernel: int, stride: int, padding: int, dilation: int, *, ceil_mode: bool) -> int:
    free = size + 2 * padding - dilation * (kernel - 1) - 1
    if not ceil_mode:
        return free // stride + 1
    count = -(-free // stride) + 1
    return count - 1 if (count - 1) * stride >= size + padding else count


def _adaptive_windows(x: torch.Tensor, sizes: Sequence[int]) -> tuple[HaloWindow, ...]:
    """Return the windows of adaptive pooling. A dim fits only if its size is a multiple of its number of windows."""
    pairs = zip(x.shape[x.dim() - len(sizes) :], sizes, strict=True)
    return tuple(
        HaloWindow(dim - len(sizes), size, count, size // max(count, 1), size // max(count, 1), 0)
        for dim, (size, count) in enumerate(pairs)
    )


# Indices into planes.


def _to_whole(context: LocalContext, indices: Any, windows: Sequence[HaloWindow], split: Sequence[Halo]) -> Any:
    """Emit the conversion of flat indices into the rank's piece with halos to flat indices into the whole plane.

    If all elements of a window are the smallest number, ATen returns the index of the window's first element that is no
    padding. In the rank's piece the first element may be padding, and the conversion replaces it.
    """
    call, starts = context.call, {halo.dim: halo.start(context) for halo in split}
    places = _places(context, indices, _extended_sizes(context, windows, split))
    found = []
    for window, place in zip(windows, places, strict=True):
        if window.dim in starts:
            place = call(aten.add.Scalar, place, starts[window.dim])
            beyond = call(aten.remainder.Scalar, place, window.dilation)
            place = call(aten.where.self, call(aten.lt.Scalar, place, 0), beyond, place)
        found.append(place)
    return _flat(context, found, [window.size for window in windows])


def _to_piece(context: LocalContext, indices: Any, windows: Sequence[HaloWindow], split: Sequence[Halo]) -> Any:
    """Emit the conversion of flat indices into the whole plane to flat indices into the rank's piece with halos.

    An index outside the piece, such as 0 in padding of the batch, becomes an arbitrary index inside the piece.
    """
    starts = {halo.dim: halo.start(context) for halo in split}
    places = _places(context, indices, [window.size for window in windows])
    found = [
        context.call(aten.sub.Scalar, place, starts[window.dim]) if window.dim in starts else place
        for window, place in zip(windows, places, strict=True)
    ]
    sizes = _extended_sizes(context, windows, split)
    return context.call(aten.clamp.default, _flat(context, found, sizes), 0, math.prod(sizes) - 1)


def _extended_sizes(context: LocalContext, windows: Sequence[HaloWindow], split: Sequence[Halo]) -> list[int]:
    extended = {halo.dim: halo.extended_size(context) for halo in split}
    return [extended.get(window.dim, window.size) for window in windows]


def _places(context: LocalContext, indices: Any, sizes: Sequence[int]) -> list[Any]:
    """Emit the conversion of flat indices into a plane of `sizes` to indices along each dim of the plane."""
    places = []
    for size in reversed(sizes[1:]):
        places.append(context.call(aten.remainder.Scalar, indices, size))
        indices = context.call(aten.div.Scalar_mode, indices, size, rounding_mode="floor")
    return [indices, *reversed(places)]


def _flat(context: LocalContext, places: Sequence[Any], sizes: Sequence[int]) -> Any:
    flat = places[0]
    for place, size in zip(places[1:], sizes[1:], strict=True):
        flat = context.call(aten.add.Tensor, context.call(aten.mul.Scalar, flat, size), place)
    return flat


def _without_values(context: LocalContext, x: Any, split: Sequence[Halo]) -> Any:
    """Emit an empty tensor with the shape of operand 1, `x`, extended by the halos `split`.

    It serves calls that only read the operand's shape. Without halos, return `x` itself.
    """
    if not split:
        return x
    shape = context.input_shape(1)
    for halo in split:
        shape[halo.dim] = halo.extended_size(context)
    return context.call(aten.new_empty.default, x, shape)


# Maxima.


def _max_pool(space: int) -> Callable[..., Rule]:
    def rule(
        x: torch.Tensor, kernel: Ints, stride: Ints = (), padding: Ints = 0, dilation: Ints = 1, ceil_mode: bool = False
    ) -> Rule:
        windows = _windows(x, space, kernel, stride, padding, dilation, ceil_mode)
        fill = identity_of(Reduction.MAX, x.dtype)
        return _rule(x, windows, "x", "yy", local=partial(_local_max_pool, windows=windows, fill=fill))

    return rule


def _local_max_pool(
    context: LocalContext, x: Any, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False, *, windows: Sequence[HaloWindow], fill: float,
) -> Any:  # fmt: skip
    if not (split := split_halos(context, _halos(windows))):
        return context.default(x, kernel, stride, padding, dilation, ceil_mode)
    padding = inner_padding(padding, len(windows), split)
    x = extend_all(context, x, split, fill)
    found = context.default(x, kernel, stride, padding, dilation, ceil_mode)
    return found[0], _to_whole(context, found[1], windows, split)


def _max_pool_backward(space: int) -> Callable[..., Rule]:
    def rule(
        grad: torch.Tensor, x: torch.Tensor, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints, ceil_mode: bool,
        indices: torch.Tensor,
    ) -> Rule:  # fmt: skip
        windows = _windows(x, space, kernel, stride, padding, dilation, ceil_mode)
        return _rule(x, windows, "yxy", "x", **_BACKWARD, local=partial(_local_max_pool_backward, windows=windows))

    return rule


def _local_max_pool_backward(
    context: LocalContext, grad: Any, x: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool,
    indices: Any, *, windows: Sequence[HaloWindow],
) -> Any:  # fmt: skip
    if not (split := split_halos(context, _halos(windows))):
        return context.default(grad, x, kernel, stride, padding, dilation, ceil_mode, indices)
    padding = inner_padding(padding, len(windows), split)
    indices = _to_piece(context, indices, windows, split)
    x = _without_values(context, x, split)
    gradient = context.default(grad, x, kernel, stride, padding, dilation, ceil_mode, indices)
    return fold_all(context, gradient, split)


def _adaptive_max_pool(x: torch.Tensor, sizes: Sequence[int]) -> Rule:
    windows = _adaptive_windows(x, sizes)

    def local(context: LocalContext, x: Any, sizes: Any) -> Any:
        found = context.default(x, _local_sizes(context, windows, sizes))
        split = split_halos(context, _halos(windows))
        return (found[0], _to_whole(context, found[1], windows, split)) if split else found

    return _rule(x, windows, "x", "yy", local=local)


def _adaptive_max_pool_backward(space: int) -> Callable[..., Rule]:
    def rule(grad: torch.Tensor, x: torch.Tensor, indices: torch.Tensor) -> Rule:
        windows = _adaptive_windows(x, grad.shape[-space:])

        def local(context: LocalContext, grad: Any, x: Any, indices: Any) -> Any:
            split = split_halos(context, _halos(windows))
            return context.default(grad, x, _to_piece(context, indices, windows, split) if split else indices)

        return _rule(x, windows, "yxy", "x", **_BACKWARD, local=local)

    return rule


def _local_sizes(context: LocalContext, windows: Sequence[HaloWindow], sizes: Sequence[int]) -> list[int]:
    """Return the size of a rank's result along each spatial dim. `sizes` has the sizes of the whole result."""
    pairs = zip(windows, sizes, strict=True)
    return [context.local_size(window.factor) if window.fits else size for window, size in pairs]


# Averages.


def _average_windows(
    x: torch.Tensor, space: int, kernel: Ints, stride: Ints, padding: Ints, ceil_mode: bool, counts_padding: bool,
    divisor: int | None,
) -> tuple[HaloWindow, ...]:  # fmt: skip
    """Return the windows of average pooling along each spatial dim.

    Windows that reach into padding may be divided by another number than other windows of the dim. Then `is_plain` is
    False, so that the dim is not split.
    """
    windows = _windows(x, space, kernel, stride, padding, 1, ceil_mode)
    return tuple(
        HaloWindow(
            w.dim, w.size, w.count, w.kernel, w.stride, w.padding,
            is_plain=divisor is not None or ((counts_padding or not w.padding) and w.halo.right <= w.padding),
        )
        for w in windows
    )  # fmt: skip


def _average_pool(space: int) -> Callable[..., Rule]:
    def rule(
        x: torch.Tensor, kernel: Ints, stride: Ints = (), padding: Ints = 0, ceil_mode: bool = False,
        counts_padding: bool = True, divisor: int | None = None,
    ) -> Rule:  # fmt: skip
        windows = _average_windows(x, space, kernel, stride, padding, ceil_mode, counts_padding, divisor)
        return _rule(x, windows, "x", "y", linear=_LINEAR, local=partial(_local_average_pool, windows=windows))

    return rule


def _local_average_pool(
    context: LocalContext, x: Any, kernel: Any, stride: Any = (), padding: Any = 0, *rest: Any,
    windows: Sequence[HaloWindow],
) -> Any:  # fmt: skip
    if not (split := split_halos(context, _halos(windows))):
        return context.default(x, kernel, stride, padding, *rest)
    padding = inner_padding(padding, len(windows), split)
    return context.default(extend_all(context, x, split, 0), kernel, stride, padding, *rest)


def _average_pool_backward(space: int) -> Callable[..., Rule]:
    def rule(
        grad: torch.Tensor, x: torch.Tensor, kernel: Ints, stride: Ints, padding: Ints, ceil_mode: bool,
        counts_padding: bool, divisor: int | None,
    ) -> Rule:  # fmt: skip
        windows = _average_windows(x, space, kernel, stride, padding, ceil_mode, counts_padding, divisor)
        local = partial(_local_average_pool_backward, windows=windows)
        return _rule(x, windows, "yx", "x", **_BACKWARD, local=local)

    return rule


def _local_average_pool_backward(
    context: LocalContext, grad: Any, x: Any, kernel: Any, stride: Any, padding: Any, *rest: Any,
    windows: Sequence[HaloWindow],
) -> Any:  # fmt: skip
    split = split_halos(context, _halos(windows))
    padding = inner_padding(padding, len(windows), split)
    x = _without_values(context, x, split)
    return fold_all(context, context.default(grad, x, kernel, stride, padding, *rest), split)


def _adaptive_average_pool(x: torch.Tensor, sizes: Sequence[int]) -> Rule:
    windows = _adaptive_windows(x, sizes)

    def local(context: LocalContext, x: Any, sizes: Any) -> Any:
        return context.default(x, _local_sizes(context, windows, sizes))

    return _rule(x, windows, "x", "y", linear=_LINEAR, local=local)


def _adaptive_average_pool_backward(space: int) -> Callable[..., Rule]:
    def rule(grad: torch.Tensor, x: torch.Tensor) -> Rule:
        return _rule(x, _adaptive_windows(x, grad.shape[-space:]), "yx", "x", **_BACKWARD)

    return rule


sharding_rule(aten.max_pool2d_with_indices.default)(_max_pool(2))
sharding_rule(aten.max_pool3d_with_indices.default)(_max_pool(3))
sharding_rule(aten.max_pool2d_with_indices_backward.default)(_max_pool_backward(2))
sharding_rule(aten.max_pool3d_with_indices_backward.default)(_max_pool_backward(3))
sharding_rule(aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default)(_adaptive_max_pool)
sharding_rule(aten.adaptive_max_pool2d_backward.default)(_adaptive_max_pool_backward(2))
sharding_rule(aten.adaptive_max_pool3d_backward.default)(_adaptive_max_pool_backward(3))
sharding_rule(aten.avg_pool1d.default)(_average_pool(1))
sharding_rule(aten.avg_pool2d.default)(_average_pool(2))
sharding_rule(aten.avg_pool3d.default)(_average_pool(3))
sharding_rule(aten.avg_pool2d_backward.default)(_average_pool_backward(2))
sharding_rule(aten.avg_pool3d_backward.default)(_average_pool_backward(3))
sharding_rule(aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default)(_adaptive_average_pool)
sharding_rule(aten._adaptive_avg_pool2d_backward.default)(_adaptive_average_pool_backward(2))
sharding_rule(aten._adaptive_avg_pool3d_backward.default)(_adaptive_average_pool_backward(3))
