"""If a rank stops in mid-step, the other ranks raise one clear error.

If a process ends, the backend soon tells its neighbours. If it runs but does not communicate, ranks wait as long as
`init_process_group(timeout=...)` allows, by default 30 minutes with Gloo and 10 minutes with NCCL.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from autoshard.errors import LostRankError

_GLOO = "gloo"
"""A word in the text of Gloo's errors, which are plain `RuntimeError`s: the text names Gloo's source file."""


@contextlib.contextmanager
def naming_lost_ranks() -> Iterator[None]:
    """Within the context, errors of communication between processes become `LostRankError`s."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and _GLOO not in str(error).lower():
            raise
        raise LostRankError(
            f"Rank {dist.get_rank()} was communicating with other ranks, and one of them stopped or did not answer in "
            "time. Look for the rank that failed first and its own error (killed for memory, a failing node). Then "
            f"start the run again from its last checkpoint. ({error})"
        ) from error


@contextlib.contextmanager
def naming_a_lost_store(rank: int) -> Iterator[None]:
    """Within the context, errors of this rank's connection to the store become `LostRankError`s."""
    try:
        yield
    except RuntimeError as error:
        raise LostRankError(
            f"Rank {rank} cannot reach the store of the run: the process that holds it (the first rank, or "
            f"the launcher) ended. Look for its error first. ({error})"
        ) from error
