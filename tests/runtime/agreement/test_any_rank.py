"""Ranks ask each other whether something holds on any of them."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from autoshard.runtime.agreement.any_rank import AnyRank
from autoshard.runtime.agreement.control_channel import ControlChannel
from tests.runtime.processes import checked_once, report


def all_ranks_get_one_answer() -> None:
    """One rank's yes is everybody's, over sockets and over the store."""
    any_rank = AnyRank(ControlChannel(range(dist.get_world_size()), timeout_s=20.0))
    assert any_rank._vectors is not None
    for _ in range(2):
        assert not any_rank(False, str)
        for rank in range(dist.get_world_size()):
            assert any_rank(dist.get_rank() == rank, str)
        any_rank._vectors = None


CHECKS = {check.__name__: check for check in (all_ranks_get_one_answer,)}
outcomes = checked_once(CHECKS, ranks=3)


@pytest.mark.parametrize("name", CHECKS)
def test_any_rank(outcomes: dict[str, str], name: str) -> None:
    """No check fails."""
    report(outcomes, name)


def test_one_process_answers_itself() -> None:
    """A process alone needs no channel."""
    any_rank = AnyRank(None)
    assert any_rank(True, str)
    assert not any_rank(False, str)
