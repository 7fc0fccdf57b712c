"""Follow padding through calls that weigh or leave out elements: softmax, attention, dropout, losses.

The function of an operator returns the `PaddedValue`s of a call's results, or raises `ReachedError` if padding may
change the results outside padding.
"""

from __future__ import annotations

import math

import torch

from passes.padding.by_rule import by_rule
from passes.padding.contents import PaddedContent, constant, content_of_type, is_masked
from passes.padding.padded_calls import PaddedCall, Results, padded_call
from passes.padding.padded_values import Dim, PaddedValue, Place, ReachedError, Region, is_padded_part

aten = torch.ops.aten
ours = torch.ops.autoshard

_FINITE = content_of_type(torch.float32)
_ANY = PaddedContent(-math.inf, math.inf, is_finite=False)

_LOGARITHMS = (aten._log_softmax.default, aten.log_softmax.int)


@padded_call(
    aten._softmax.default, aten._log_softmax.default, aten.softmax.int, aten.log_softmax.int, aten._safe_softmax.default
)
def _softmax(call: PaddedCall) -> Results:
    """Return the `PaddedValue` of a softmax.

    Raises:
        ReachedError: a score in padding may have weight: it is not -inf, and no mask adds a large negative number to
            it.
    """
    (x,) = call.operands
    dim = call.argument(1, "dim") % max(len(x.dims), 1)
    if not x.is_padded or not x.is_dim_padded(dim):
        return by_rule(call)
    along = _places_in(x, dim)
    _check_masked(x, along)

    def content(region: Region) -> PaddedContent:
        is_finite = region <= along or x.content(region - along).has_no_infinity_of_its_own
        if call.target in _LOGARITHMS:
            return PaddedContent(-math.inf, 0, is_finite and not region & along)
        if region & along and is_masked(x.content(region)) and is_finite:
            return constant(0)
        return PaddedContent(0, 1, is_finite)

    call.check_weights(content(region) for region in x.contents if region and not region & along)
    return (PaddedValue.of(x.dims, content),)


def _places_in(x: PaddedValue, dim: int) -> frozenset[Place]:
    return frozenset(place for place in x.places if place[0] == dim)


def _check_masked(x: PaddedValue, along: frozenset[Place]) -> None:
    for region, content in x.contents.items():
        if region and region <= along and not is_masked(content):
            raise ReachedError("weighs padding, whose scores are not masked (-inf)")


@padded_call(aten.logsumexp.default)
def _log_sum_exp(call: PaddedCall) -> Results:
    (x,) = call.operands
    given = call.argument(1, "dim")
    listed = [given] if isinstance(given, int) else [*given] or [*range(len(x.dims))]
    removed = {dim % max(len(x.dims), 1) for dim in listed}
    along = frozenset(place for place in x.places if place[0] in removed)
    if not along:
        return by_rule(call)
    _check_masked(x, along)
    keepdim = call.argument(2, "keepdim", False)
    kept = [dim for dim in range(len(x.dims)) if dim not in removed or keepdim]
    dims: list[Dim] = [((1, 1),) if dim in removed else x.dims[dim] for dim in kept]

    def content(region: Region) -> PaddedContent:
        found = x.content((kept[dim], part) for dim, part in region)
        return PaddedContent(-math.inf, math.inf, not region or found.is_finite)

    call.check_weights(item for region, item in x.contents.items() if region and not region & along)
    return (PaddedValue.of(dims, content),)


# Attention.


@padded_call(ours.attention.default, sizes=(10,))
def _attention(call: PaddedCall) -> Results:
    """Return the `PaddedValue`s of attention's results.

    Raises:
        ReachedError: padding may change the results outside padding. For example, neither a mask nor causality hides
            the keys in padding from the queries.
    """
    q, k, v = (call.operand(index) for index in range(3))
    mask = None if call.argument(3, "mask") is None else call.operand(3)
    is_causal, offset = call.argument(6, "is_causal"), call.argument(9, "offset")
    if any(x.is_dim_padded(3) for x in (q, k, v)) or any(offset):
        raise ReachedError("needs all of the padded dim")
    if q.dims[0] != k.dims[0] or k.dims[:3] != v.dims[:3] or q.is_dim_padded(1) or k.is_dim_padded(1):
        raise ReachedError("takes the padded dim and another one for the same")
    queries, keys = q.plain_part(2), k.plain_part(2)
    if is_padded_part(keys) and not (is_causal and queries[1] <= keys[1]):
        _check_mask(call, mask)
    if not all(item.is_finite for x in (k, v) for item in x.contents.values()):
        raise ReachedError("multiplies by numbers in padding, which may be NaN")

    def content(region: Region) -> PaddedContent:
        return PaddedContent(-math.inf, math.inf, q.content(region).is_finite)

    return (
        PaddedValue.of((*q.dims[:3], v.dims[3]), content),
        PaddedValue.of(q.dims[:3], lambda _: _ANY),
    )


def _check_mask(call: PaddedCall, mask: PaddedValue | None) -> None:
    """Raise `ReachedError` if no mask hides all keys in padding."""
    place = None if mask is None else (len(mask.dims) - 1, 0)
    if mask is None or place not in mask.places:
        raise ReachedError("attends to padding: neither a mask nor causality leaves it out")
    mask.plain_part(place[0])
    dtype = call.node.args[3].meta["val"].dtype  # type: ignore[union-attr]
    content = mask.content({place})
    if not (content.is_zero if dtype == torch.bool else is_masked(content)):
        raise ReachedError("attends to padding, which its mask does not leave out")


# Random numbers are drawn for the padded tensor, as with dropout on one device.


@padded_call(ours.dropout.default, sizes=(4, 5))
def _dropout(call: PaddedCall) -> Results:
    """Return the `PaddedValue` of dropout's result: zeros in padding stay zero, other numbers are scaled or dropped."""
    x = call.operands[0]

    def content(region: Region) -> PaddedContent:
        found = x.content(region)
        return found if found.is_zero else PaddedContent(-math.inf, math.inf, found.is_finite)

    return (PaddedValue.of(x.dims, content),)


@padded_call(ours.random.default, sizes=(4, 5, 6))
def _random(call: PaddedCall) -> Results:
    return (PaddedValue.of(call.plain_dims(), lambda _: content_of_type(call.node.meta["val"].dtype)),)


# Losses.


@padded_call(ours.cross_entropy.default)
def _cross_entropy(call: PaddedCall) -> Results:
    """Return the `PaddedValue`s of cross-entropy.

    Rows whose target is `ignore_index` have loss zero for any logits.

    Raises:
        ReachedError: the dim of classes is padded, or rows of logits and targets are padded differently.
    """
    logits, target = call.operands
    if logits.is_dim_padded(1):
        raise ReachedError("needs all of the padded dim")
    ignored = call.argument(2, "ignore_index")
    return _rows_of_loss(logits, target, ignored)


def _rows_of_loss(logits: PaddedValue, target: PaddedValue, ignored: int) -> Results:
    rows = (logits.dims[0],)
    if target.dims != rows:
        raise ReachedError("takes the padded dim and another one for the same")

    def content(region: Region) -> PaddedContent:
        if target.content(region).is_only(ignored):
            return constant(0)
        return PaddedContent(-math.inf, math.inf, logits.content(region).is_finite)

    return (PaddedValue.of(rows, content), PaddedValue.of(rows, lambda _: _ANY))


@padded_call(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def _nll_loss(call: PaddedCall) -> Results:
    """Return the `PaddedValue`s of a negative log likelihood loss and of its total weight, by which a mean divides.

    Raises:
        ReachedError: a target in padding is not `ignore_index`, so the total weight would count it.
    """
    x, target = call.operands[0], call.operands[1]
    reduction, ignored = call.argument(3, "reduction"), call.argument(4, "ignore_index")
    rows = [place for place in range(len(x.dims)) if place != (1 if len(x.dims) > 1 else 0)]
    if any(x.is_dim_padded(dim) for dim in range(len(x.dims)) if dim not in rows):
        raise ReachedError("needs all of the padded dim")
    if [x.dims[dim] for dim in rows] != [*target.dims]:
        raise ReachedError("takes the padded dim and another one for the same")
    if not all(content.is_only(ignored) for region, content in target.contents.items() if region):
        raise ReachedError(f"counts padding, whose target is not ignore_index={ignored}")
    scalar = PaddedValue.of((), lambda _: _FINITE)
    if reduction:
        return (scalar, scalar)
    return (PaddedValue.of(target.dims, lambda region: constant(0) if region else _FINITE), scalar)
