"""Copies at collectives that go with the kernels beside them."""

from __future__ import annotations

import pytest
import torch

from autoshard import Cluster, Mesh, P
from autoshard.ir.spec import PartitionSpec, Reduction
from passes.planning.copy_prices import Taken, saved_table
from passes.strategies.enumerate_strategies import ValueInfo
from passes.strategies.price import Prices

MESH = Mesh({"x": 4})
PRICES = Prices(Cluster("h100_sxm", 1, 4), MESH)
VALUE = ValueInfo((4096, 4096), torch.float32)

SUM = P(partial={"x": Reduction.SUM})
SENT = (SUM, P(None, "x"))
"""A reduce-scatter over the second dim: what is sent is copied into pieces."""
RECEIVED = (P(None, "x"), P())
"""An all-gather over the second dim: what was received is put together."""
NEITHER = (P("x"), P())


def saved(pair: tuple[PartitionSpec, PartitionSpec], taken: Taken) -> tuple[float, float]:
    """Seconds that go with the kernel before a reshard, and with the one behind."""
    times = PRICES.reshard_table(VALUE, pair[:1], pair[1:])
    before, behind = saved_table(VALUE, pair[:1], pair[1:], times, taken, PRICES)
    return before.item(), behind.item()


@pytest.mark.parametrize("is_read_again", [False, True])
@pytest.mark.parametrize(
    ("pair", "has_copies"), [(SENT, (True, False)), (RECEIVED, (False, True)), (NEITHER, (False, False))]
)
def test_only_a_copy_that_there_is_goes(
    pair: tuple[PartitionSpec, PartitionSpec], has_copies: tuple[bool, bool], is_read_again: bool
) -> None:
    """A value that is read elsewhere saves no more, and nothing without a copy."""
    found = saved(pair, Taken(True, True, is_read_again, is_read_again))
    assert tuple(seconds != 0 for seconds in found) == has_copies
    alone = saved(pair, Taken(True, True, False, False))
    assert all(again <= once for again, once in zip(found, alone, strict=True))
    assert saved(pair, Taken(False, False, is_read_again, is_read_again)) == (0, 0)
