"""4-bit weights are split by rows if no block of weights is cut."""

from __future__ import annotations

import pytest
import torch

from autoshard.kernels.dequantize import GROUP, SCALE_VALUES
from autoshard.rules import strategies
from tests.rules.recording import check_splits

dequantize = torch.ops.autoshard.dequantize_nf4.default


def call(rows: int, columns: int, *, nested: bool, blocksize: int = 64) -> tuple[object, ...]:
    weights = rows * columns
    blocks = -(-weights // blocksize)
    packed = torch.randint(0, 256, (weights // 2, 1), dtype=torch.uint8)
    if not nested:
        return packed, torch.rand(blocks).view(torch.uint8), None, [rows, columns], blocksize, 0, torch.float32
    absmax = torch.randint(0, 256, (blocks,), dtype=torch.uint8)
    scales = torch.rand(SCALE_VALUES + 1 + blocks // GROUP + 1).view(torch.uint8)
    return packed, absmax, scales, [rows, columns], blocksize, 0, torch.float32


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(12, 64), (12, 192), (24, 32)])
def test_rows_are_split(nested: bool, rows: int, columns: int) -> None:
    """Under every strategy, weights equal one device's, with one block, three blocks or half a block in each row."""
    check_splits(dequantize, *call(rows, columns, nested=nested))


def split_rows(*args: object, ranks: int) -> bool:
    """Whether some strategy splits the rows; check that no strategy splits columns or gives a partial sum."""
    results = [outputs[0] for _, outputs in strategies(dequantize, args, {}, ranks)]
    assert all(result.is_replicate() or result.is_shard(0) for result in results)
    return any(result.is_shard(0) for result in results)


@pytest.mark.parametrize(
    ("rows", "columns", "ranks", "is_split"),
    [(8, 64, 4, True), (6, 64, 4, False), (8, 32, 4, True), (4, 32, 4, False), (8, 96, 4, True), (3, 32, 2, False)],
)
def test_no_block_is_cut(rows: int, columns: int, ranks: int, is_split: bool) -> None:
    """Rows are split only if no rank's rows cut a block; otherwise the weight stays whole."""
    assert split_rows(*call(rows, columns, nested=True), ranks=ranks) is is_split
