"""Find calls that read or write each sample of a batch at its own index, such as `x[arange(len(x)), y]`.

In such a call a micro-batch may count its samples from zero, although they have other indices in the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autoshard.rules.notation import BoundRule
from passes.verification.batch_states import BatchIndices, Same, SlicedDim, State

aten = torch.ops.aten

COUNTS = (aten.arange.default, aten.arange.start, aten.arange.start_step)
READS_AT = (aten.index.Tensor, aten._unsafe_index.Tensor)
WRITES_AT = (aten.index_put.default, aten._unsafe_index_put.default)
_TRIANGLES = (aten.tril.default, aten.triu.default)
_FROM_ZERO = (("start", 0), ("step", 1))


def counts_from_zero(node: fx.Node) -> bool:
    """Whether a call is an `arange` that counts 0, 1, 2, ..."""
    return node.target in COUNTS and all(argument(node, name) in (None, default) for name, default in _FROM_ZERO)


def _is_beside(state: State, dim: int) -> bool:
    """Whether a value is equal in all parts, or is split into parts along dim `dim`."""
    return state == Same() or state == SlicedDim(dim)


def read_at_places(node: fx.Node, states: Mapping[fx.Node, Sequence[State]]) -> State | None:
    """Return the state of the result of a call that reads or writes each sample only at the sample's own index.

    `node` calls an operator of `READS_AT` or `WRITES_AT`. `states` has the state of each result of each node. None is
    returned if the call may read or write other samples.
    """
    source, indices = node.args[:2]
    assert isinstance(source, fx.Node)
    assert isinstance(indices, Sequence)
    (state,) = states[source]
    given = {dim: index for dim, index in enumerate(indices) if isinstance(index, fx.Node)}
    values = {dim: index.meta["val"] for dim, index in given.items()}
    has_masks = any(value.dtype in (torch.bool, torch.uint8) for value in values.values())
    if not isinstance(state, SlicedDim) or state.before > 1 or has_masks:
        return None
    place = states[given[state.dim]][0] if state.dim in given else None
    if not isinstance(place, BatchIndices) or place.size != source.meta["val"].shape[state.dim]:
        return None
    width = max(value.dim() for value in values.values())
    sample = width - values[state.dim].dim() + place.dim
    others = [(states[index][0], width - values[dim].dim()) for dim, index in given.items() if dim != state.dim]
    if not all(_is_beside(other, sample - missing) for other, missing in others):
        return None
    first, last = min(given), max(given)
    chosen = sample + (first if last - first == len(given) - 1 else 0)
    if node.target in READS_AT:
        return SlicedDim(chosen, state.exponent)
    written = node.args[2]
    assert isinstance(written, fx.Node)
    missing = source.meta["val"].dim() - len(given) + width - written.meta["val"].dim()
    is_alike = not state.exponent and _is_beside(states[written][0], chosen - missing)
    return state if is_alike else None


def knows_places(node: fx.Node, rule: BoundRule, factor: str) -> bool:
    """Whether a call is a `tril` or `triu` whose rows or columns are samples, so that it depends on their indices.

    Samples lie along `factor` of the call's sharding rule.
    """
    return node.target in _TRIANGLES and any(factor in factors for factors in rule.outputs[0][-2:])


def argument(node: fx.Node, name: str) -> Any:
    """Return a call's argument by its name in the operator's schema, or None if the schema has no such name."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.name == name:
            return node.args[position] if position < len(node.args) else node.kwargs.get(name, argument.default_value)
    return None
