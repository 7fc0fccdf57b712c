"""Halo exchange for operators that slide windows over a split dim, such as convolution and pooling.

Window o of an operator with stride s and padding p reads the elements o s - p to o s - p + e - 1, where
e = dilation (kernel - 1) + 1. If the dim has s elements for each window, it is a product of factors (o s). The ranks
that split o then hold a part of the windows, and s elements for each of these windows.

To compute its windows a rank lacks the *halos*: p elements before its piece, and e - s - p elements after it. If the
latter number is negative, the rank has surplus elements. Halos come from the neighbours. At both ends of the dim they
are the operator's own padding. A gradient goes the other way: a rank sends the gradients of its halos back, and the
neighbour adds them. The method is that of Dryden et al., "Improving strong-scaling of CNN training by exploiting
finer-grained parallelism" (2019), chapter III.

If several dims are split, they are extended one after the other, so that corners travel in two steps. Gradients are
folded in reverse order.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.rules.dims import BLOCKED
from autoshard.rules.local import LocalContext

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class HaloWindow:
    """The windows of an operator along one dim of its operand.

    Args:
        dim: the dim in operand and result, a negative index from the end.
        size: the number of elements of the operand's dim.
        count: the number of windows, which is the size of the result's dim.
        kernel, stride, padding, dilation: the operator's options for this dim.
        is_plain: whether all windows are computed in the same way, even those that reach into padding.
    """

    dim: int
    size: int
    count: int
    kernel: int
    stride: int
    padding: int
    dilation: int = 1
    is_plain: bool = True

    @property
    def factor(self) -> str:
        """Name of the factor o, the number of the window: "o1" for the last dim."""
        return f"o{-self.dim}"

    @property
    def stride_factor(self) -> str:
        """Name of the factor s, the place of an element within its stride: "s1" for the last dim."""
        return f"s{-self.dim}"

    @property
    def fits(self) -> bool:
        """Whether the dim may be split: it has `stride` elements for each window, and all windows are alike."""
        return self.is_plain and 0 < self.size == self.count * self.stride

    @property
    def extent(self) -> int:
        """Number of elements from the first to the last element of a window, both included."""
        return self.dilation * (self.kernel - 1) + 1

    @property
    def halo(self) -> Halo:
        """The halo that a rank needs to compute its own windows."""
        return Halo(self.dim, self.factor, self.stride, self.padding, self.extent - self.stride - self.padding)

    @property
    def elements(self) -> tuple[str, ...]:
        """The factors of the operand's dim: `factor` and `stride_factor`.

        If `fits` is False, the dim has one factor, which cannot be split.
        """
        return (self.factor, self.stride_factor) if self.fits else BLOCKED

    @property
    def windows(self) -> tuple[str, ...]:
        """The factors of the result's dim: `factor`, or a factor that cannot be split if `fits` is False."""
        return (self.factor,) if self.fits else BLOCKED


@dataclass(frozen=True, slots=True)
class Halo:
    """The elements that a rank needs beside its own piece of a dim.

    Args:
        dim: the dim, a negative index from the end.
        factor: the factor of the rule that splits the dim.
        scale: number of elements of the dim for each element of the factor.
        left, right: numbers of elements before and after the piece. A negative `right` counts surplus elements.
    """

    dim: int
    factor: str
    scale: int
    left: int
    right: int

    @property
    def least(self) -> int:
        """Least number of the factor's elements in a piece, so that neighbours can take their halos, or 0."""
        return -(-max(self.left, self.right, 0) // self.scale)

    def size(self, context: LocalContext) -> int:
        """Return the number of elements of the dim in the rank's own piece, without halos."""
        return context.local_size(self.factor) * self.scale

    def extended_size(self, context: LocalContext) -> int:
        """Return the number of elements of the dim in the rank's piece with halos."""
        return self.left + self.size(context) + self.right

    def start(self, context: LocalContext) -> Any:
        """Return the global index, in the dim, of the first element of the rank's piece with halos."""
        return context.offset(self.factor) * self.scale - self.left


def sliding(
    elements: Sequence[int],
    windows: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int] = (1,),
    *,
    is_plain: bool = True,
) -> tuple[HaloWindow, ...]:
    """Return the windows of each spatial dim, the last dims of the operand.

    Args:
        elements: the operand's size of each spatial dim.
        windows: the result's size of each spatial dim.
        kernel, stride, padding, dilation: the operator's options, one for each spatial dim or one for all of them.
        is_plain: whether all windows are computed in the same way, even those that reach into padding.
    """
    space = len(elements)
    options = (each(option, space) for option in (kernel, stride, padding, dilation))
    rows = zip(elements, windows, *options, strict=True)
    return tuple(HaloWindow(index - space, *row, is_plain=is_plain) for index, row in enumerate(rows))


def each(option: int | Sequence[int], space: int) -> tuple[int, ...]:
    """Return an operator's option, one number or a number for each dim, as a tuple of `space` numbers."""
    listed = (option,) if isinstance(option, int) else tuple(option)
    return listed * space if len(listed) == 1 else listed


def stride_factors(windows: Sequence[HaloWindow]) -> dict[str, int]:
    """Return a dict from `HaloWindow.stride_factor` to the stride, for each window that fits.

    These factors cannot be split.
    """
    return {window.stride_factor: window.stride for window in windows if window.fits}


def window_factors(windows: Sequence[HaloWindow]) -> tuple[str, ...]:
    """Return `HaloWindow.factor` of each window that fits. These factors can only be split evenly."""
    return tuple(window.factor for window in windows if window.fits)


def exchanged(halos: Sequence[Halo]) -> dict[str, int]:
    """Return `Rule.exchanged` for these halos: from a factor to the least number of its elements in a piece."""
    return {halo.factor: halo.least for halo in halos if halo.least}


def split_halos(context: LocalContext, halos: Sequence[Halo]) -> list[Halo]:
    """Return those of `halos` whose dims are split between ranks."""
    return [halo for halo in halos if context.shards(halo.factor) > 1]


def inner_padding(padding: int | Sequence[int], space: int, halos: Sequence[Halo]) -> list[int]:
    """Return the padding with which a rank calls the operator, one number for each of `space` spatial dims.

    It is 0 for dims that `halos` extends, because halos include padding. The other dims keep `padding`.
    """
    extended = {halo.dim + space for halo in halos}
    return [0 if dim in extended else amount for dim, amount in enumerate(each(padding, space))]


def extend_all(context: LocalContext, value: Any, halos: Sequence[Halo], fill: float) -> Any:
    """Emit calls that extend a rank's piece by the halos of several dims, in order, and return the extended piece."""
    for halo in halos:
        value = extend(context, value, halo, fill)
    return value


def fold_all(context: LocalContext, value: Any, halos: Sequence[Halo]) -> Any:
    """Emit the backward of `extend_all`, and return the gradient of the rank's own piece.

    `value` is the gradient of the extended piece. Dims are folded in reverse order.
    """
    for halo in reversed(halos):
        value = fold(context, value, halo)
    return value


def extend(context: LocalContext, value: Any, halo: Halo, fill: float) -> Any:
    """Emit calls that extend a rank's piece by its halo, and return the extended piece.

    The halo has elements of the neighbours, which hold enough of them (`Halo.least`). At both ends of the dim the halo
    is `fill`, the operator's padding value.
    """
    size, right = halo.size(context), max(halo.right, 0)
    to_right = _narrow(context, value, halo, size - halo.left, halo.left)
    to_left = _narrow(context, value, halo, 0, right)
    if halo.right < 0:
        value = _narrow(context, value, halo, 0, size + halo.right)
    from_left, from_right = _swap(context, halo, to_right, to_left, (halo.left, right), fill)
    parts = [part for part in (from_left, value, from_right) if part is not None]
    return parts[0] if len(parts) == 1 else context.call(aten.cat.default, parts, halo.dim)


def fold(context: LocalContext, value: Any, halo: Halo) -> Any:
    """Emit the backward of `extend`: return the gradient of a rank's piece, given the gradient of the extended piece.

    Gradients of a neighbour's elements are sent to the neighbour and added there. Gradients of padding are dropped.
    """
    size, right = halo.size(context), max(halo.right, 0)
    if not halo.left and not halo.right:
        return value
    to_left = _narrow(context, value, halo, 0, halo.left)
    to_right = _narrow(context, value, halo, halo.left + size, right)
    value = _narrow(context, value, halo, halo.left, size + min(halo.right, 0))
    if halo.right < 0:
        pads = [0, 0] * (-halo.dim - 1) + [0, -halo.right]
        value = context.call(aten.constant_pad_nd.default, value, pads)
    from_left, from_right = _swap(context, halo, to_right, to_left, (right, halo.left), 0)
    if from_right is not None:
        rest = _narrow(context, value, halo, 0, size - halo.left)
        end = _narrow(context, value, halo, size - halo.left, halo.left)
        value = _join(context, rest, context.call(aten.add.Tensor, end, from_right), halo)
    if from_left is not None:
        start = _narrow(context, value, halo, 0, right)
        rest = _narrow(context, value, halo, right, size - right)
        value = _join(context, context.call(aten.add.Tensor, start, from_left), rest, halo)
    return value


def _narrow(context: LocalContext, value: Any, halo: Halo, start: int, length: int) -> Any:
    """Emit a slice of `value` along the halo's dim: `length` elements from `start` on. For length 0, return None."""
    return context.call(aten.narrow.default, value, halo.dim, start, length) if length else None


def _join(context: LocalContext, first: Any, second: Any, halo: Halo) -> Any:
    parts = [part for part in (first, second) if part is not None]
    return context.call(aten.cat.default, parts, halo.dim)


def _swap(
    context: LocalContext, halo: Halo, to_right: Any, to_left: Any, sizes: tuple[int, int], fill: float
) -> tuple[Any, Any]:
    """Emit an exchange of strips with both neighbours, and return the strips from the left and the right neighbour.

    The strips `to_right` and `to_left` are sent. The returned strips have `sizes[0]` and `sizes[1]` elements along the
    dim. An empty strip is None. At an end of the dim, `fill` replaces the missing neighbour's elements. One all-gather
    moves both strips, because other collectives would need other shapes at the ends of the dim.
    """
    sent = [strip for strip in (to_right, to_left) if strip is not None]
    if not sent:
        return None, None
    both = sent[0] if len(sent) == 1 else context.call(aten.cat.default, sent, halo.dim)
    strips = context.all_gather(both, halo.factor)
    ranks, index = context.shards(halo.factor), context.index(halo.factor)

    def receive(step: int, first: int, start: int, length: int) -> Any:
        """Return elements `start` to `start + length` - 1 of the strips from the rank that is `step` places further on.

        The rank with index `first` has no neighbour in this direction, and gets `fill`.
        """
        if not length:
            return None
        strip = context.call(aten.select.int, strips, 0, (index + step) % ranks)
        if len(sent) > 1:
            strip = _narrow(context, strip, halo, start, length)
        has_neighbour = context.call(operator.ne, index, first)
        condition = context.call(aten.new_full.default, strip, [], has_neighbour, dtype=torch.bool)
        return context.call(aten.where.ScalarOther, condition, strip, fill)

    return receive(ranks - 1, 0, 0, sizes[0]), receive(1, ranks - 1, sizes[0], sizes[1])
