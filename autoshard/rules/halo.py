"""Halo exchange: operators that slide windows over a dim that is split between ranks.

Window o of an operator with stride s and padding p reads the elements o s - p ... o s - p + e - 1, where
e = dilation (kernel - 1) + 1. If size = windows x s, the dim is a product of factors (o s): the ranks that split o
hold the windows and just the elements between them. To compute its windows a rank lacks p elements before its piece
and e - s - p after it, the *halos* (where the latter is negative, it has more than it needs). They come from the
neighbours, and from the operator's own padding at the ends of the line. A gradient goes the other way: what a rank
found for elements of its halos is sent back and added. (Dryden et al. 2019, "Improving strong-scaling of CNN training
by exploiting finer-grained parallelism", section III.)

Where several dims are split they are extended one after the other, so that corners travel in two steps, and gradients
are folded in reverse order.
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
    """The windows along one dim of an operand.

    Args:
        dim: the dim in operand and result, counted from the last one, which is -1.
        size: how many elements it has.
        count: how many windows there are.
        kernel, stride, padding, dilation: of the windows.
        is_plain: whether all windows are alike, those that reach into padding too.
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
        """The factor of the rule that counts windows."""
        return f"o{-self.dim}"

    @property
    def within(self) -> str:
        """The factor that counts the elements between the starts of two windows."""
        return f"s{-self.dim}"

    @property
    def fits(self) -> bool:
        """Whether pieces of the dim have just the elements between the windows of a rank."""
        return self.is_plain and 0 < self.size == self.count * self.stride

    @property
    def extent(self) -> int:
        """The number of elements from the first to the last that a window reads."""
        return self.dilation * (self.kernel - 1) + 1

    @property
    def halo(self) -> Halo:
        """What a rank's piece of the elements lacks to compute its windows."""
        return Halo(self.dim, self.factor, self.stride, self.padding, self.extent - self.stride - self.padding)

    @property
    def elements(self) -> tuple[str, ...]:
        """The factors of the dim of elements."""
        return (self.factor, self.within) if self.fits else BLOCKED

    @property
    def windows(self) -> tuple[str, ...]:
        """The factors of the dim of windows."""
        return (self.factor,) if self.fits else BLOCKED


@dataclass(frozen=True, slots=True)
class Halo:
    """What a rank's piece of a dim lacks on either side.

    Args:
        dim: the dim, counted from the last one, which is -1.
        factor: the factor of the rule that splits it.
        scale: how many elements of the dim belong to one of the factor.
        left, right: how many elements are missing; a negative `right` is how many are too many.
    """

    dim: int
    factor: str
    scale: int
    left: int
    right: int

    @property
    def least(self) -> int:
        """The smallest piece, counted in the factor, from which a neighbour can take its halo; 0 for an empty halo."""
        return -(-max(self.left, self.right, 0) // self.scale)

    def size(self, context: LocalContext) -> int:
        """The number of elements in the rank's piece."""
        return context.local_size(self.factor) * self.scale

    def extended_size(self, context: LocalContext) -> int:
        """The number of elements with halos."""
        return self.left + self.size(context) + self.right

    def start(self, context: LocalContext) -> Any:
        """The global index of the first element with halos."""
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
    """The windows of each spatial dim; these are the last dims. Options of length one hold for all."""
    space = len(elements)
    options = (each(option, space) for option in (kernel, stride, padding, dilation))
    rows = zip(elements, windows, *options, strict=True)
    return tuple(HaloWindow(index - space, *row, is_plain=is_plain) for index, row in enumerate(rows))


def each(option: int | Sequence[int], space: int) -> tuple[int, ...]:
    """An option for each of `space` dims."""
    listed = (option,) if isinstance(option, int) else tuple(option)
    return listed * space if len(listed) == 1 else listed


def within(windows: Sequence[HaloWindow]) -> dict[str, int]:
    """The factors of a rule that count elements between windows, with their sizes; they cannot be split."""
    return {window.within: window.stride for window in windows if window.fits}


def counted(windows: Sequence[HaloWindow]) -> tuple[str, ...]:
    """The factors of a rule that count windows; they can only be split evenly."""
    return tuple(window.factor for window in windows if window.fits)


def exchanged(halos: Sequence[Halo]) -> dict[str, int]:
    """The factors over which neighbours talk, for `Rule.exchanged`."""
    return {halo.factor: halo.least for halo in halos if halo.least}


def split_halos(context: LocalContext, halos: Sequence[Halo]) -> list[Halo]:
    """Those of dims that some axis splits."""
    return [halo for halo in halos if context.shards(halo.factor) > 1]


def inner_padding(padding: int | Sequence[int], space: int, halos: Sequence[Halo]) -> list[int]:
    """The padding that the operator still does itself: none along extended dims."""
    extended = {halo.dim + space for halo in halos}
    return [0 if dim in extended else amount for dim, amount in enumerate(each(padding, space))]


def extend_all(context: LocalContext, value: Any, halos: Sequence[Halo], fill: float) -> Any:
    """`extend` along several dims."""
    for halo in halos:
        value = extend(context, value, halo, fill)
    return value


def fold_all(context: LocalContext, value: Any, halos: Sequence[Halo]) -> Any:
    """`fold` along several dims that `extend_all` extended."""
    for halo in reversed(halos):
        value = fold(context, value, halo)
    return value


def extend(context: LocalContext, value: Any, halo: Halo, fill: float) -> Any:
    """A rank's piece with what it lacks: elements of the neighbours, and `fill` beyond the ends of the line.

    Args:
        context: the place of the rank.
        value: the piece; its size along `halo.dim` is `halo.size(context)`, along others anything.
        halo: what it lacks; the neighbours have as much (`Halo.least`).
        fill: what the operator pads with.
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
    """The gradient of a rank's piece from that of the piece with halos: the transpose of `extend`.

    What was found for a neighbour's elements is sent there and added; what was found for padding is dropped.
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
    """Some elements of the dim; None for none."""
    return context.call(aten.narrow.default, value, halo.dim, start, length) if length else None


def _join(context: LocalContext, first: Any, second: Any, halo: Halo) -> Any:
    parts = [part for part in (first, second) if part is not None]
    return context.call(aten.cat.default, parts, halo.dim)


def _swap(
    context: LocalContext, halo: Halo, to_right: Any, to_left: Any, sizes: tuple[int, int], fill: float
) -> tuple[Any, Any]:
    """What the left and the right neighbour send, `fill` where there is none; None for strips of no size.

    One all-gather moves both strips: they are thin, and it is the one collective with the same shapes on all ranks.
    """
    sent = [strip for strip in (to_right, to_left) if strip is not None]
    if not sent:
        return None, None
    both = sent[0] if len(sent) == 1 else context.call(aten.cat.default, sent, halo.dim)
    strips = context.all_gather(both, halo.factor)
    ranks, index = context.shards(halo.factor), context.index(halo.factor)

    def receive(step: int, first: int, start: int, length: int) -> Any:
        """The strip of the rank `step` further on, `fill` on the rank `first`, which has no such neighbour."""
        if not length:
            return None
        strip = context.call(aten.select.int, strips, 0, (index + step) % ranks)
        if len(sent) > 1:
            strip = _narrow(context, strip, halo, start, length)
        has_neighbour = context.call(operator.ne, index, first)
        condition = context.call(aten.new_full.default, strip, [], has_neighbour, dtype=torch.bool)
        return context.call(aten.where.ScalarOther, condition, strip, fill)

    return receive(ranks - 1, 0, 0, sizes[0]), receive(1, ranks - 1, sizes[0], sizes[1])
