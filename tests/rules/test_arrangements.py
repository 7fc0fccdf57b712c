"""Operators that rearrange elements have one device's results under every strategy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Shard

from autoshard.rules import strategies
from tests.rules.recording import check_call, tensor

aten = torch.ops.aten

_X = tensor(4, 8)
_MASK = _X > 0
_INDEX = tensor(4, integers=8)

_CALLS: list[tuple[torch._ops.OpOverload, tuple[Any, ...]]] = [
    *((aten.rot90.default, (tensor(4, 4, 8), k, [0, 2])) for k in range(-1, 4)),
    (aten.channel_shuffle.default, (tensor(4, 8, 4), 2)),
    (aten.narrow_copy.default, (_X, 1, 2, 4)),
    (aten.narrow_copy.default, (_X, -1, 0, 8)),
    (aten.block_diag.default, ([_X, tensor(3), tensor(2, 2)],)),
    (aten._chunk_cat.default, ([tensor(4, 6), tensor(4, 2, 4)], 1, 2)),
    (aten._chunk_cat.default, ([tensor(4, 6), tensor(3)], 0, 2)),
    (aten.masked_scatter.default, (_X, _MASK, tensor(40))),
    (aten.masked_scatter_backward.default, (_X, _MASK, [4, 8])),
    (aten.masked_select.default, (_X, _MASK)),
    (aten.masked_select.default, (_X, _MASK[0])),
    (aten.put.default, (_X, torch.randperm(4), tensor(4))),
    (aten.put.default, (_X, _INDEX, tensor(4), True)),
    (aten.put.default, (_X, _INDEX, tensor(2, 2), True)),
    (aten.put.default, (_X, _INDEX, tensor(2, 2))),
    (aten._unsafe_masked_index.default, (_X, _MASK[:, 0], [_INDEX % 4, _INDEX], 0)),
    (aten._unsafe_masked_index.default, (_X, _MASK[:, 0], [_INDEX % 4, _INDEX], 3)),
    (aten._unsafe_masked_index_put_accumulate.default, (_X, _MASK[:, 0], [_INDEX % 4, _INDEX], tensor(4))),
    (aten.max_unpool2d.default, (tensor(4, 4, 1, 2), torch.tensor([[0, 3]]).expand(4, 4, 1, 2), [2, 4])),
    (aten.trace.default, (tensor(4, 4),)),
]


@pytest.mark.parametrize(("op", "args"), _CALLS, ids=str)
def test_every_strategy_is_sound(op: torch._ops.OpOverload, args: tuple[Any, ...]) -> None:
    """Each operator has a splitting strategy, and every strategy gives one device's results."""
    assert check_call(op, *args) > 3


def _admitted(op: torch._ops.OpOverload, *args: Any) -> list[tuple[Any, ...]]:
    return [(*inputs, *outputs) for inputs, outputs in strategies(op, args, {}, 2)]


def test_a_quarter_turn_keeps_one_of_its_dims() -> None:
    """A quarter turn can split only one of the two exchanged dims, the dim that keeps its direction."""
    x = tensor(4, 4)
    shards = [pair for pair in _admitted(aten.rot90.default, x, 1) if isinstance(pair[0], Shard)]
    assert shards == [(Shard(0), Shard(1))]
    shards = [pair for pair in _admitted(aten.rot90.default, x, 3) if isinstance(pair[0], Shard)]
    assert shards == [(Shard(1), Shard(0))]


def test_a_filled_value_passes_no_sum() -> None:
    """A pending sum passes a masked look-up that fills with zero, but not with 3, which each rank would add."""
    args = (_X, _MASK[:, 0], [_INDEX % 4, _INDEX])
    assert (Partial("sum"),) in [(pair[0],) for pair in _admitted(aten._unsafe_masked_index.default, *args, 0)]
    assert (Partial("sum"),) not in [(pair[0],) for pair in _admitted(aten._unsafe_masked_index.default, *args, 3)]
