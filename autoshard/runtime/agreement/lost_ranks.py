"""A rank that stops amid a step ends the others with one clear error.

Who communicates with a process that is gone is told by the backend at once; who waits for one that was told so, once
that one ends, as a script does on an error. A process that is there but does not come is waited for as long as the
process group allows (`init_process_group(timeout=...)`; by default 30 minutes with Gloo, 10 with NCCL).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from autoshard.errors import LostRankError

_GLOO = "gloo"
"""Gloo raises plain `RuntimeError`s, whose text names its source file."""


@contextlib.contextmanager
def naming_lost_ranks() -> Iterator[None]:
    """Within, an error of communication between processes is a `LostRankError`; others stay what they are."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and _GLOO not in str(error).lower():
            raise
        raise LostRankError(
            f"Rank {dist.get_rank()} was communicating with other ranks, and one of them stopped or did not answer in "
            "time. Look for the rank that failed first and its own error (killed for memory, a failing node); then "
            f"start the run again from its last checkpoint. ({error})"
        ) from error


@contextlib.contextmanager
def naming_a_lost_store(rank: int) -> Iterator[None]:
    """Within, a store that this rank cannot reach is a `LostRankError`."""
    try:
        yield
    except RuntimeError as error:
        raise LostRankError(
            f"Rank {rank} cannot reach the store of the run: the process that holds it (the first rank, or "
            f"the launcher) ended. Look for its error first. ({error})"
        ) from error
