"""Operators that exchange rows between ranks: uneven numbers of rows work, and numbers that disagree are refused."""

from __future__ import annotations

import pytest
import torch

from autoshard.kernels.exchange import Exchange, Steps, run_together


def steps(rows: int, sent: list[int], received: list[int], times: int = 1) -> Steps:
    """A rank that exchanges `rows` rows `times` times, and returns the last received rows as a list."""
    arrived = [torch.arange(rows)]
    for _ in range(times):
        arrived = list((yield Exchange(arrived, sent, received)))
    return arrived[0].tolist()


def test_rows_go_where_they_are_sent() -> None:
    """Rows arrive at the ranks that they are sent to, in uneven numbers or none."""
    assert run_together([steps(3, [1, 2], [1, 0]), steps(1, [0, 1], [2, 1])]) == [[0], [1, 2, 0]]


def test_ranks_that_expect_other_rows_are_refused() -> None:
    """A rank that expects another number of rows than a rank sends is refused, with its number and both lists."""
    with pytest.raises(ValueError, match=r"rank 1 expects \[1, 1\] rows of each rank, but is sent \[2, 1\]"):
        run_together([steps(3, [1, 2], [1, 0]), steps(1, [0, 1], [1, 1])])


def test_ranks_that_end_before_others_are_refused() -> None:
    """A rank that exchanges twice is refused when the other rank exchanges once."""
    with pytest.raises(ValueError, match="1 of 2 ranks exchange rows, but the others have ended"):
        run_together([steps(2, [1, 1], [1, 1]), steps(2, [1, 1], [1, 1], times=2)])
