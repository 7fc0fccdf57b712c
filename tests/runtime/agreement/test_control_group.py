"""`ControlGroup.any` tells every rank whether a condition holds on any rank."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from autoshard.runtime.agreement.control_group import ControlGroup
from tests.runtime.processes import checked_once, report


def all_ranks_get_one_answer() -> None:
    """If the condition holds on one rank, all get True, over sockets and over the store; else False."""
    control = ControlGroup(range(dist.get_world_size()), timeout_s=20.0)
    assert control.vectors is not None
    for waits in (False, True):
        assert not control.any(False, "ask", waits=waits)
        for rank in range(dist.get_world_size()):
            assert control.any(dist.get_rank() == rank, "ask", waits=waits)


CHECKS = {check.__name__: check for check in (all_ranks_get_one_answer,)}
outcomes = checked_once(CHECKS, ranks=3)


@pytest.mark.parametrize("name", CHECKS)
def test_any_rank(outcomes: dict[str, str], name: str) -> None:
    """The check passes on every rank."""
    report(outcomes, name)
