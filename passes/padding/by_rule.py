"""Prove by an operator's sharding rule that padding of its operands does not reach the clean part of its results.

A factor is an index of the rule: `m k, k n -> m n` has three. The clean part of a tensor is its elements outside
padding. The exact program is the same program without padding. A region is the clean part, or one part of the padding
(`padded_values`).

1. Each padded part of a dim must belong to one factor of the rule, padded alike in all operands and results.
2. A parallel factor is in all results, so each of its elements is computed by itself. The clean part then depends only
   on clean parts, if the operator computes a piece of the factor without knowing the piece's offset.
3. A reduced factor is missing in a result. Its padding must not change the reduced number. This holds for a linear
   operator if one operand is zero there, and the other operands are finite. It also holds if the padding has the
   fill value that the rule gives for the reduction.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autoshard.graphs.pointwise import is_pointwise
from autoshard.ir.program import tensor_values
from autoshard.ir.spec import Reduction
from autoshard.rules.notation import BoundRule, Dims
from autoshard.rules.registry import bound_rule
from autoshard.tracing.bounded import ROWWISE, runs_without_rewrite
from passes.padding.contents import PaddedContent, constant, content_of_type, either, is_masked, masked_sum
from passes.padding.padded_calls import PaddedCall, Results
from passes.padding.padded_values import CLEAN, Dim, PaddedValue, Place, ReachedError, Region, is_padded_part

aten = torch.ops.aten

Label = tuple[str, int]
"""The name of a factor, and the index of one of its parts (`padded_values.Part`)."""

_BY_ROWS = ROWWISE | frozenset(
    {
        *(aten.mean.dim, aten.linalg_vector_norm.default, aten.norm.ScalarOpt_dim),
        *(aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction),
        *(aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default, aten.logsumexp.default),
        *(aten.softmax.int, aten.log_softmax.int, aten._safe_softmax.default),
        *(aten.cumsum.default, aten.cumprod.default),
    }
)
"""Operators that compute any piece of a parallel dim by itself. Pieces of their reduced dims would need a rewrite."""


def by_rule(call: PaddedCall) -> Results:
    """Return the `PaddedValue` of each of a call's results, derived from the operator's sharding rule.

    Raises:
        ReachedError: padding may reach the clean part of a result (its elements outside padding), or the operator has
            no rule.
    """
    if not call.is_padded:
        return _clean(call)
    return _Ruled.of(call).results()


def _clean(call: PaddedCall) -> Results:
    operands = [value.content(CLEAN) for value in call.operands]
    return tuple(
        None
        if value is None
        else PaddedValue.of(
            [((size, size),) for size in value.shape], lambda _, index=index: _made(call, index, operands, CLEAN)
        )
        for index, value in enumerate(tensor_values(call.node))
    )


def _made(call: PaddedCall, result: int, operands: Sequence[PaddedContent], region: Region) -> PaddedContent:
    """Bound the numbers in a region of result number `result`, given the contents of the operands there.

    Results after the first are only known to have numbers of their dtype.
    """
    found = call.content(operands, region)
    if not result:
        return found
    value = tensor_values(call.node)[result]
    assert value is not None
    known = content_of_type(value.dtype)
    return replace(known, is_finite=known.is_finite and found.is_finite)


@dataclass(frozen=True, slots=True)
class _Ruled:
    """A call and its operator's sharding rule, with the sizes of the padded program.

    `parts` maps a factor to its parts, major to minor, each with its size in the padded program and its size without
    padding.
    """

    call: PaddedCall
    bound: BoundRule
    parts: Mapping[str, Dim]

    @classmethod
    def of(cls, call: PaddedCall) -> _Ruled:
        args, kwargs = fx.map_arg((call.node.args, call.node.kwargs), lambda operand: operand.meta["val"])
        bound = bound_rule(call.target, args, kwargs, tensor_values(call.node))
        if bound is None or len(bound.inputs) != len(call.operands):
            raise ReachedError("has no sharding rule that describes it")
        parts: dict[str, Dim] = {}
        for value, dims in zip(call.operands, bound.inputs, strict=True):
            for dim, factors in zip(value.dims, dims, strict=True):
                _assign(parts, factors, dim, bound.sizes)
        return cls(call, bound, parts)

    def results(self) -> Results:
        for factor in self._padded():
            self._check_parallel(factor)
        reduced = [label for label in self._labels() if not self._is_parallel(label[0])]
        for labels in _nonempty_subsets(reduced):
            if not self._is_absorbed(labels):
                raise ReachedError("takes padding into its result")
        present = [index for index, value in enumerate(tensor_values(self.call.node)) if value is not None]
        made = {
            index: PaddedValue.of(self._dims(number, index), self._content_of(number, index, reduced))
            for number, index in enumerate(present)
        }
        for value in list(made.values())[:1]:
            self.call.check_weights(content for region, content in value.contents.items() if region)
        return tuple(made.get(index) for index in range(len(tensor_values(self.call.node))))

    def _padded(self) -> list[str]:
        return [factor for factor, parts in self.parts.items() if any(map(is_padded_part, parts))]

    def _labels(self) -> list[Label]:
        return [(f, i) for f in self._padded() for i, part in enumerate(self.parts[f]) if is_padded_part(part)]

    def _is_parallel(self, factor: str) -> bool:
        return all(_has(dims, factor) for dims in self.bound.outputs)

    def _check_parallel(self, factor: str) -> None:
        bound = self.bound
        is_known = factor in bound.padding and factor not in bound.blocked
        if not is_known or bound.may_communicate(factor):
            raise ReachedError("needs all of the padded dim")
        is_plain = bound.local is None
        if not is_plain and self._is_parallel(factor):
            is_plain = self.call.target in _BY_ROWS or runs_without_rewrite(self.call.target, bound, factor)
        if not is_plain:
            raise ReachedError("depends on the length")

    def _is_absorbed(self, labels: frozenset[Label]) -> bool:
        return self._is_zero(labels) or self._is_filled(labels)

    def _is_zero(self, labels: frozenset[Label]) -> bool:
        """Whether the padding of the reduced parts `labels` adds only zeros to the clean part of the first result."""
        if any(self.bound.reduce.get(factor) is not Reduction.SUM for factor, _ in labels):
            return False
        found = self._operands(0, CLEAN, labels)
        groups = [group - self.bound.added for group in self.bound.linear]
        return any(
            group
            and all(found[index].is_zero for index in group)
            and all(item.is_finite for index, item in enumerate(found) if index not in group | self.bound.added)
            for group in groups
        )

    def _is_filled(self, labels: frozenset[Label]) -> bool:
        found, clean = self._operands(0, CLEAN, labels), self._operands(0, CLEAN, frozenset())
        for factor, _ in labels:
            fills = self.bound.padding[factor]
            known = [index for index, dims in enumerate(self.bound.inputs) if _has(dims, factor)]
            reduction = self.bound.reduce.get(factor)
            if not known or not all(changes_nothing(reduction, fills[i], found[i], clean[i]) for i in known):
                return False
        return True

    def _operands(self, result: int, region: Region, labels: frozenset[Label]) -> list[PaddedContent]:
        """Return the content of each operand in the elements that `region` of result number `result` reads.

        A reduction reads several regions of an operand. `labels` selects one: the elements in the padding of the
        reduced parts `labels`, and in no padding of other reduced parts.
        """
        wanted = {self._label(self.bound.outputs[result], place) for place in region} | labels
        return [
            value.content(place for place in value.places if self._label(dims, place) in wanted)
            for value, dims in zip(self.call.operands, self.bound.inputs, strict=True)
        ]

    def _label(self, dims: Dims, place: Place) -> Label:
        dim, part = place
        for factor in dims[dim]:
            if part < len(self.parts[factor]):
                return factor, part
            part -= len(self.parts[factor])
        raise AssertionError(place)

    def _dims(self, result: int, index: int) -> list[Dim]:
        """Return the dims of a result, each as its parts.

        `result` numbers only the results that are tensors, and `index` numbers all results.
        """
        shapes = zip(self.call.shapes(0)[index], self.call.shapes(1)[index], strict=True)
        return [self._dim(factors, sizes) for factors, sizes in zip(self.bound.outputs[result], shapes, strict=True)]

    def _dim(self, factors: tuple[str, ...], sizes: tuple[int, int]) -> Dim:
        if all(factor in self.parts for factor in factors) and factors:
            return tuple(part for factor in factors for part in self.parts[factor])
        if sizes[0] != sizes[1]:
            raise ReachedError("makes a dim of the length")
        return (sizes,)

    def _content_of(self, result: int, index: int, reduced: Sequence[Label]) -> Callable[[Region], PaddedContent]:
        subsets = [frozenset[Label](), *_nonempty_subsets(reduced)]
        reductions = [self.bound.reduce.get(factor) for factor, _ in reduced]
        is_one = len(set(reductions)) == 1
        combine = _COMBINED.get(reductions[0], either) if is_one else either
        may_sum = not is_pointwise(self.call.target)

        def content(region: Region) -> PaddedContent:
            if self.bound.transparent:
                first, *others = self._operands(result, region, frozenset())
                return replace(first, is_clean=False, is_like_clean=False) if others and region else first
            if may_sum and self._has_zero_addends(result, region, subsets):
                return constant(0)
            found = [self._operands(result, region, labels) for labels in subsets]
            if mask := self._added_mask(found):
                return masked_sum(mask)
            together = [combine(items) for items in zip(*found, strict=True)]
            are_clean = [item.is_clean or self._is_clean(result, region, i) for i, item in enumerate(together)]
            operands = [replace(item, is_clean=is_clean) for item, is_clean in zip(together, are_clean, strict=True)]
            return _made(self.call, index, operands, region)

        return content

    def _is_clean(self, result: int, region: Region, operand: int) -> bool:
        """Whether `region` of result number `result` reads only clean elements of operand number `operand`."""
        wanted = {self._label(self.bound.outputs[result], place) for place in region}
        value, dims = self.call.operands[operand], self.bound.inputs[operand]
        return not any(self._label(dims, place) in wanted for place in value.places)

    def _added_mask(self, found: Sequence[Sequence[PaddedContent]]) -> PaddedContent | None:
        """Return the content of a mask that the call adds to finite products, as `baddbmm` does; None without a mask.

        `found` has the contents of all operands, once for each set of padded reduced parts.
        """
        if len(self.bound.added) != 1 or self.call.node.kwargs:
            return None
        (added,) = self.bound.added
        others = [item for contents in found for index, item in enumerate(contents) if index != added]
        is_mask = is_masked(found[0][added]) and all(item.is_finite for item in others)
        return found[0][added] if is_mask else None

    def _has_zero_addends(self, result: int, region: Region, subsets: Sequence[frozenset[Label]]) -> bool:
        """Whether `region` of a result is zero, because operands in which the call is linear are zero in all addends.

        A member of `subsets` is a set of reduced parts. It stands for the addends that lie in the padding of exactly
        these parts.
        """
        groups = [group for group in self.bound.linear if group]
        return any(
            all(
                all(
                    item.is_zero if index in group else item.is_finite
                    for index, item in enumerate(self._operands(result, region, labels))
                )
                for labels in subsets
            )
            for group in groups
        )


def _least_of(contents: Iterable[PaddedContent]) -> PaddedContent:
    known = list(contents)
    return replace(either(known), high=min(item.high for item in known))


def _greatest_of(contents: Iterable[PaddedContent]) -> PaddedContent:
    known = list(contents)
    return replace(either(known), low=max(item.low for item in known))


_COMBINED: Mapping[Reduction | None, Callable[[Iterable[PaddedContent]], PaddedContent]] = {
    Reduction.MIN: _least_of,
    Reduction.MAX: _greatest_of,
}
"""Reduction → function from the contents of several regions to the content of their numbers' minimum or maximum."""


def _assign(parts: dict[str, Dim], factors: tuple[str, ...], dim: Dim, sizes: Mapping[str, int]) -> None:
    """Record in `parts` the parts of an operand's dim under the dim's factor.

    Raises:
        ReachedError: the dim has padding, and the rule merges several factors in it.
    """
    is_padded = any(map(is_padded_part, dim))
    if len(factors) != 1:
        if is_padded:
            raise ReachedError("merges the padded dim with another one")
        for factor in factors:
            parts.setdefault(factor, ((sizes[factor], sizes[factor]),))
        return
    (factor,) = factors
    known = parts.setdefault(factor, dim)
    if known == dim:
        return
    if is_padded or any(map(is_padded_part, known)):
        raise ReachedError("takes the padded dim and another one for the same")
    size = math.prod(size for size, _ in dim)
    parts[factor] = ((size, size),)


def changes_nothing(reduction: Reduction | None, fill: Any, padding: PaddedContent, clean: PaddedContent) -> bool:
    """Whether a reduction over clean elements and padding has the same result as over the clean elements alone.

    `fill` is the number that the sharding rule pads with, or None.
    """
    if reduction is Reduction.MAX:
        return padding.high <= _least(clean)
    if reduction is Reduction.MIN:
        return padding.low >= _greatest(clean)
    return fill is not None and padding.is_only(float(fill))


def _least(clean: PaddedContent) -> float:
    return clean.low if clean.low > -math.inf or not clean.is_finite else -_FLOAT_MAX


def _greatest(clean: PaddedContent) -> float:
    return clean.high if clean.high < math.inf or not clean.is_finite else _FLOAT_MAX


_FLOAT_MAX = 3.3e38
"""Finite numbers are taken to be at most this large. Only the last numbers of float32 and bfloat16 are larger."""


def _has(dims: Dims, factor: str) -> bool:
    return any(factor in dim for dim in dims)


def _nonempty_subsets(labels: Sequence[Label]) -> Iterator[frozenset[Label]]:
    for count in range(1, len(labels) + 1):
        yield from map(frozenset, itertools.combinations(labels, count))
