"""If a rank stops in the middle of a step, the other ranks raise one clear error.

If a process ends, the backend soon tells its neighbours. If it runs but does not communicate, ranks wait as long as
`init_process_group(timeout=...)` allows, by default 30 minutes with Gloo and 10 minutes with NCCL.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch.distributed as dist

from autoshard.errors import LostRankError
from autoshard.runtime.agreement.failure_reports import report_failure, reports_in_words

_GLOO = "gloo"
"""A word in the text of Gloo's errors, which are plain `RuntimeError`s: the text names Gloo's source file."""

Doing = str | Callable[[BaseException], str]
"""A communication in words, such as "receiving 'hidden'", or a function from an error to such words."""


@contextlib.contextmanager
def naming_lost_ranks(doing: Doing = "") -> Iterator[None]:
    """Within the context, raise errors of communication between processes as `LostRankError`, with `doing` in its text.

    Any other error is raised as it is, after a report to the other ranks, which may wait for this rank.
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, RuntimeError) or not (
            isinstance(error, dist.DistError) or _GLOO in str(error).lower()
        ):
            report_failure(error)
            raise
        words = doing if isinstance(doing, str) else doing(error)
        sentences = [
            f"Rank {dist.get_rank()} was communicating with other ranks, and one of them stopped or did not answer in "
            "time.",
            f"It was {words}." if words else "",
            reports_in_words(waits="timed out" in str(error).lower()),
            "Look for the rank that failed first and its own error (killed for memory, a failing node).",
            "Then start the run again from its last checkpoint.",
            f"({error})",
        ]
        raise LostRankError(" ".join(filter(None, sentences))) from error


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
