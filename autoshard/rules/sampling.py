"""Draws operands of other sizes and values for a call of an operator, to infer its sharding rule.

Draws must expose a wrong rule. Values are drawn from normal distributions of several scales. They are also drawn from
the sample's own values, because an operator may be defined for positive numbers only. Sizes are drawn until the
operator accepts them. Dims that must have equal sizes are found by trial.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Dim = tuple[int, int]
"""A dim of an operand, as (index of the operand, index of the dim)."""

TiedDims = frozenset[Dim]
"""A set of dims that the operator only accepts with equal sizes."""

REFUSALS = (RuntimeError, ValueError, IndexError, TypeError, AssertionError, ArithmeticError)
"""Errors that operators raise on unsuitable operands."""

_SMALL_SIZES = (2, 3, 4, 6, 8, 9, 12)
_NORMAL_SCALES = (1.0, 10.0, 100.0)
_MOST_TIED = 6


@dataclass(frozen=True, slots=True)
class SampledCall:
    """A call of an operator without its tensor operands.

    Args:
        leaves: all arguments, flattened by pytree, with None in place of each tensor.
        spec: the structure of `(args, kwargs)` for `tree_unflatten`.
        places: indices of the tensors in `leaves`.
    """

    operator: Any
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    places: tuple[int, ...]

    def run(self, operands: Sequence[Tensor]) -> list[Tensor]:
        """Run the call with `operands`, and return its tensor results in order. Errors of the operator pass through."""
        leaves = list(self.leaves)
        for place, operand in zip(self.places, operands, strict=True):
            leaves[place] = operand
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        with torch.no_grad():
            results = self.operator(*args, **kwargs)
        return [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, Tensor)]

    def attempt(self, operands: Sequence[Tensor]) -> list[Tensor] | None:
        """Run the call with `operands`, and return its tensor results, or None if the operator raises an error."""
        try:
            return self.run(operands)
        except REFUSALS:
            return None


@dataclass(frozen=True, slots=True)
class Trial:
    """Whole operands that the operator accepts, with the operator's results."""

    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]

    def size(self, tie: TiedDims) -> int:
        """Return the size that the dims of `tie` have in this trial."""
        operand, dim = min(tie)
        return self.operands[operand].shape[dim]


@dataclass(frozen=True, slots=True)
class Sampler:
    """Draws operands for a call from an accepted `sample`, by a fixed seed, so that inferred rules are reproducible."""

    call: SampledCall
    sample: tuple[Tensor, ...]
    generator: torch.Generator = field(default_factory=lambda: torch.Generator("cpu").manual_seed(0))

    def in_widest_type(self) -> Sampler:
        """Return a sampler with floats converted to float64, so that rounding is smaller.

        If the operator raises an error for float64, return this sampler.
        """
        wide = tuple(map(_widened, self.sample))
        return replace(self, sample=wide) if self.call.attempt(wide) is not None else self

    def ties(self) -> list[TiedDims]:
        """Return the smallest sets of dims whose size can only be changed together. Dims of size one are left out."""
        open_dims = [(i, dim) for i, x in enumerate(self.sample) for dim in range(x.dim()) if x.shape[dim] > 1]
        found: list[TiedDims] = []
        while open_dims:
            tie = self._smallest_tie(open_dims[0], open_dims[1:])
            taken = tie or frozenset({open_dims[0]})
            open_dims = [dim for dim in open_dims if dim not in taken]
            if tie is not None:
                found.append(tie)
        return found

    def _smallest_tie(self, dim: Dim, others: Sequence[Dim]) -> TiedDims | None:
        equal = [other for other in others if self._size(other) == self._size(dim)]
        for count in range(min(len(equal), _MOST_TIED) + 1):
            for partners in combinations(equal, count):
                if self._can_change(frozenset({dim, *partners})):
                    return frozenset({dim, *partners})
        return None

    def _can_change(self, tie: TiedDims) -> bool:
        size = self._size(min(tie))
        changed = (self.call.attempt(self.draw({tie: new}, None)) for new in (2 * size, 3 * size, size + 1))
        return any(results is not None for results in changed)

    def _size(self, dim: Dim) -> int:
        return self.sample[dim[0]].shape[dim[1]]

    def trials(self, ties: Sequence[TiedDims], count: int) -> Iterator[Trial]:
        """Yield a trial with the sample itself, then up to `count` trials for each scale of drawn values."""
        yield from self._trial(self.sample)
        for scale in (None, *_NORMAL_SCALES):
            for _ in range(count):
                yield from self._drawn_trial(ties, scale)

    def _drawn_trial(self, ties: Sequence[TiedDims], scale: float | None) -> Iterator[Trial]:
        """Yield a trial with drawn sizes and values, or no trial if the operator accepts none of the draws.

        The first draws have small sizes, and the last draws have multiples of the sample's sizes.
        """
        for draw_size in (self._small_size, self._small_size, self._multiple, self._multiple):
            trial = list(self._trial(self.draw({tie: draw_size(tie) for tie in ties}, scale)))
            if trial:
                yield from trial
                return

    def _trial(self, operands: Sequence[Tensor]) -> Iterator[Trial]:
        results = self.call.attempt(operands)
        if results is not None:
            yield Trial(tuple(operands), tuple(results))

    def _small_size(self, tie: TiedDims) -> int:
        """Draw a small size for the dims `tie`.

        If the sample has integers, which may index the dims, draw a multiple of the sample's size instead.
        """
        if any(not _is_float(x) for x in self.sample):
            return self._multiple(tie)
        return _SMALL_SIZES[self._integer(len(_SMALL_SIZES))]

    def _multiple(self, tie: TiedDims) -> int:
        return self._size(min(tie)) * (1 + self._integer(3))

    def _integer(self, limit: int) -> int:
        return int(torch.randint(limit, (), generator=self.generator, device="cpu"))

    def draw(self, sizes: Mapping[TiedDims, int], scale: float | None) -> tuple[Tensor, ...]:
        """Draw operands. The dims of each tie in `sizes` get its new size, and other dims keep the sample's size.

        `scale` is the standard deviation of normal values. None draws values like those of the sample. Integers are
        always elements of the sample.
        """
        shapes = [list(x.shape) for x in self.sample]
        for tie, size in sizes.items():
            for operand, dim in tie:
                shapes[operand][dim] = size
        return tuple(self._values(x, shape, scale) for x, shape in zip(self.sample, shapes, strict=True))

    def _values(self, like: Tensor, shape: Sequence[int], scale: float | None) -> Tensor:
        if not _is_float(like):
            return self._chosen(like, shape)
        dtype, like = like.dtype, computable(like)
        if scale is None and bool(like.any()) and bool(like.isfinite().all()):
            drawn = self._chosen(like, shape) * self.noise(like, shape).sigmoid().add(0.5)
        else:
            drawn = self.noise(like, shape) * (scale or 1.0)
        return drawn.to(dtype)

    def _chosen(self, like: Tensor, shape: Sequence[int]) -> Tensor:
        if like.numel() == 0:
            return like.new_zeros(tuple(shape))
        index = torch.randint(like.numel(), tuple(shape), generator=self.generator, device="cpu")
        return like.flatten()[index.to(like.device)]

    def noise(self, like: Tensor, shape: Sequence[int]) -> Tensor:
        """Draw a tensor of `shape` with standard normal values, of the dtype and device of `like`."""
        dtype = torch.complex128 if like.is_complex() else torch.float64
        return torch.randn(tuple(shape), dtype=dtype, generator=self.generator, device="cpu").to(like)

    def addends(self, x: Tensor, count: int) -> list[Tensor]:
        """Draw `count` random tensors that add up to `x`."""
        scale = x.abs().amax() if x.numel() else 1.0
        noise = [self.noise(x, x.shape) * scale for _ in range(count - 1)]
        return [*noise, x - sum(noise)]


def call_of(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[SampledCall, tuple[Tensor, ...]]:
    """Split a call into a `SampledCall` and its detached tensor operands."""
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    places = tuple(place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
    rest = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    return SampledCall(operator, rest, spec, places), tuple(leaves[place].detach() for place in places)


def agree(found: Tensor, expected: Tensor) -> bool:
    """Whether two results are equal up to rounding.

    A float may differ by a small share of itself plus a far smaller share of the largest element.
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    found, expected = computable(found), computable(expected)
    if not _is_float(expected):
        return bool(torch.equal(found, expected))
    relative, absolute = (1e-7, 1e-11) if expected.dtype in (torch.float64, torch.complex128) else (1e-3, 1e-5)
    finite = expected[expected.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(found, expected, rtol=relative, atol=absolute * largest, equal_nan=True)


def is_additive(x: Tensor) -> bool:
    """Whether `x` has floats or complex numbers of more than 8 bits, so that random tensors can add up to `x`."""
    return _is_float(x) and computable(x) is x


def computable(x: Tensor) -> Tensor:
    """Return the values of `x` in a dtype in which torch computes: float32 for floats of 8 bits, or else `x` itself."""
    return x.float() if x.is_floating_point() and x.itemsize == 1 else x


def _is_float(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _widened(x: Tensor) -> Tensor:
    if x.is_complex():
        return x.to(torch.complex128)
    return x.double() if x.is_floating_point() else x
