"""Ranks that fail report their errors to all other ranks."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from autoshard import LostRankError
from autoshard.runtime.agreement.failure_reports import in_words, report_failure, reports_in_words
from autoshard.runtime.agreement.lost_ranks import naming_lost_ranks
from tests.runtime.processes import checked_once, report


def a_failed_rank_is_quoted() -> None:
    """Rank 0 quotes the first error of rank 1, and names rank 2, which reported nothing."""
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="of its own"), naming_lost_ranks():
            raise ValueError("an error of its own.")
        report_failure(ValueError("a second error"))
    dist.barrier()
    if dist.get_rank() == 0:
        assert reports_in_words(waits=False) == "Rank 1 failed with ValueError: an error of its own."
        words = "Rank 1 failed with ValueError: an error of its own. Ranks [2] gave no sign."
        assert reports_in_words(waits=True) == words
        with pytest.raises(LostRankError) as found, naming_lost_ranks("receiving 'x'"):
            raise RuntimeError("gloo: connection closed by peer")
        assert "in time. It was receiving 'x'. Rank 1 failed with ValueError: an error of its own. Look" in str(
            found.value
        )
    dist.barrier()


CHECKS = {check.__name__: check for check in (a_failed_rank_is_quoted,)}
outcomes = checked_once(CHECKS, ranks=3)


@pytest.mark.parametrize("name", CHECKS)
def test_reports(outcomes: dict[str, str], name: str) -> None:
    """The check passes on every rank."""
    report(outcomes, name)


def test_silent_ranks_are_named_beside_many_reports() -> None:
    """At most four sentences are shown, and the last names the ranks without a report, if any."""
    told = {rank: f"ValueError: {rank}" for rank in range(6)}
    assert in_words(told, [6, 7]).endswith("Rank 2 failed with ValueError: 2. Ranks [6, 7] gave no sign.")
    assert in_words(told, []).endswith("Rank 3 failed with ValueError: 3.")


def test_a_process_without_a_group_reports_nothing() -> None:
    """In a process without a group, `report_failure` does nothing."""
    report_failure(ValueError())
