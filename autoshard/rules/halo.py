"""Halo exchange: operators that slide windows over a dim that is split between ranks.

Window o of an operator with stride s and padding p reads the elements o s - p ... o s - p + e - 1, where e = dilation
(kernel - 1) + 1. If size = windows x s, the dim is a product of factors (o s). The ranks that split o then hold their
windows and just the elements between them. To compute its windows a rank lacks the *halos*, p elements before its piece
and e - s - p after it. If the latter is negative, the rank has surplus elements. Halos come from the neighbours, and
from the operator's own padding at the ends of the line. A gradient goes the other way: a rank sends the gradients of
its halos back, and the neighbour adds them. (Dryden et al. 2019, "Improving strong-scaling of CNN training by
exploiting finer-grained parallelism", chapter III.)

Several split dims are extended one after the other, so that corners travel in two steps. Gradients are folded in
reverse order.
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
        dim: the dim in operand and result, negative, counted from the last.
        size: number of elements.
        count: number of windows.
        kernel, stride, padding, dilation: parameters of the windows.
        is_plain: whether all windows are alike, even those that reach into padding.
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
        """The rule's factor that counts windows."""
        return f"o{-self.dim}"

    @property
    def within(self) -> str:
        """The rule's factor that counts the elements between the starts of two windows."""
        return f"s{-self.dim}"

    @property
    def fits(self) -> bool:
        """Whether pieces of the dim have just the elements between the windows of a rank."""
        return self.is_plain and 0 < self.size == self.count * self.stride

    @property
    def extent(self) -> int:
        """The number of elements from the first to the last of a window."""
        return self.dilation * (self.kernel - 1) + 1

    @property
    def halo(self) -> Halo:
        """The halo that a rank's piece of the elements needs for its windows."""
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
    """Missing elements of a rank's piece of a dim, on either side.

    Args:
        dim: the dim, negative, counted from the last.
        factor: the rule's factor that splits it.
        scale: elements of the dim for each element of the factor.
        left, right: number of missing elements; a negative `right` is a number of surplus elements.
    """

    dim: int
    factor: str
    scale: int
    left: int
    right: int

    @property
    def least(self) -> int:
        """The smallest piece, in elements of the factor, from which a neighbour can take its halo; 0 for an empty
        halo.
        """
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
    """The windows of each spatial dim; spatial dims are the last. Options of length one hold for all dims."""
    space = len(elements)
    options = (each(option, space) for option in (kernel, stride, padding, dilation))
    rows = zip(elements, windows, *options, strict=True)
    return tuple(HaloWindow(index - space, *row, is_plain=is_plain) for index, row in enumerate(rows))


def each(option: int | Sequence[int], space: int) -> tuple[int, ...]:
    """An option for each of `space` dims."""
    listed = (option,) if isinstance(option, int) else tuple(option)
    return listed * space if len(listed) == 1 else listed


def within(windows: Sequence[HaloWindow]) -> dict[str, int]:
    """The rule's factors that count elements between windows, with their sizes. They cannot be split."""
    return {window.within: window.stride for window in windows if window.fits}


def counted(windows: Sequence[HaloWindow]) -> tuple[str, ...]:
    """The rule's factors that count windows. They can only be split evenly."""
    return tuple(window.factor for window in windows if window.fits)


def exchanged(halos: Sequence[Halo]) -> dict[str, int]:
    """The factors along which neighbours communicate, for `Rule.exchanged`."""
    return {halo.factor: halo.least for halo in halos if halo.least}


def split_halos(context: LocalContext, halos: Sequence[Halo]) -> list[Halo]:
    """The halos of split dims."""
    return [halo for halo in halos if context.shards(halo.factor) > 1]


def inner_padding(padding: int | Sequence[int], space: int, halos: Sequence[Halo]) -> list[int]:
    """The padding left to the operator itself: none along extended dims."""
    extended = {halo.dim + space for halo in halos}
    return [0 if dim in extended else amount for dim, amount in enumerate(each(padding, space))]


def extend_all(context: LocalContext, value: Any, halos: Sequence[Halo], fill: float) -> Any:
    """`extend` along several dims."""
    for halo in halos:
        value = extend(context, value, halo, fill)
    return value


def fold_all(context: LocalContext, value: Any, halos: Sequence[Halo]) -> Any:
    """`fold` along several dims, after `extend_all`."""
    for halo in reversed(halos):
        value = fold(context, value, halo)
    return value


def extend(context: LocalContext, value: Any, halo: Halo, fill: float) -> Any:
    """Extend a rank's piece by its halo: elements of the neighbours, and `fill` beyond the ends of the line.

    Args:
        context: the place of the rank.
        value: the piece; its size along `halo.dim` is `halo.size(context)`.
        halo: its missing elements; neighbours have at least as many (`Halo.least`).
        fill: the operator's padding value.
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
    """The gradient of a rank's piece from the gradient of the piece with halos, the transpose of `extend`.

    Gradients of a neighbour's elements are sent and added there; gradients of padding are dropped.
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
    """Some elements of the dim, or None for length 0."""
    return context.call(aten.narrow.default, value, halo.dim, start, length) if length else None


def _join(context: LocalContext, first: Any, second: Any, halo: Halo) -> Any:
    parts = [part for part in (first, second) if part is not None]
    return context.call(aten.cat.default, parts, halo.dim)


def _swap(
    context: LocalContext, halo: Halo, to_right: Any, to_left: Any, sizes: tuple[int, int], fill: float
) -> tuple[Any, Any]:
    """The strips sent by the left and the right neighbour, or `fill` without a neighbour; None for empty strips.

    One all-gather moves both strips. They are thin, and no other collective has equal shapes on all ranks.
    """
    sent = [strip for strip in (to_right, to_left) if strip is not None]
    if not sent:
        return None, None
    both = sent[0] if len(sent) == 1 else context.call(aten.cat.default, sent, halo.dim)
    strips = context.all_gather(both, halo.factor)
    ranks, index = context.shards(halo.factor), context.index(halo.factor)

    def receive(step: int, first: int, start: int, length: int) -> Any:
        """The strip of the rank `step` further on; `fill` on the rank `first`, which has no neighbour there."""
        if not length:
            return None
        strip = context.call(aten.select.int, strips, 0, (index + step) % ranks)
        if len(sent) > 1:
            strip = _narrow(context, strip, halo, start, length)
        has_neighbour = context.call(operator.ne, index, first)
        condition = context.call(aten.new_full.default, strip, [], has_neighbour, dtype=torch.bool)
        return context.call(aten.where.ScalarOther, condition, strip, fill)

    return receive(ranks - 1, 0, 0, sizes[0]), receive(1, ranks - 1, sizes[0], sizes[1])
