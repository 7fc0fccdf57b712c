"""How much of a step's communication may be under way at once, from the most to the least.

`passes.lowering.overlap` makes each phase with the first limits with which memory suffices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cost_models.hardware import Cluster
from cost_models.streams import overlap_of
from passes.lowering.bucket_collectives import MIB, BucketCollectives


@dataclass(frozen=True, slots=True)
class InFlight:
    """Limits of the passes that let collectives run beside computation.

    Args:
        starts_soon: move collectives of values up, past calls that compute.
        buckets: the sizes of buckets; None: there are none.
        ahead: see `StartAhead`.
        most_held: see `WaitInTurn`.
    """

    starts_soon: bool = True
    buckets: BucketCollectives | None = field(default_factory=BucketCollectives)
    ahead: int = 1
    most_held: int | None = None


FEWEST = 12 * MIB
"""A rank's piece of a bucket that nothing runs beside. Larger buckets would win little, and a CPU's C library gives
memory of 32 MiB and more back to the system when it is freed, and takes it anew at each step."""

BESIDE: Sequence[InFlight] = (
    InFlight(),
    InFlight(most_held=2),
    InFlight(buckets=BucketCollectives(most_bytes=2 * MIB), most_held=2),
    InFlight(buckets=BucketCollectives(most_bytes=MIB // 2), most_held=2),
    InFlight(starts_soon=False, buckets=None, most_held=2),
    InFlight(starts_soon=False, buckets=None, ahead=0, most_held=1),
)
"""Limits where communication runs beside computation."""

ALONE: Sequence[InFlight] = (
    *(InFlight(starts_soon=False, buckets=BucketCollectives(None, n, n)) for n in (FEWEST, FEWEST // 3, FEWEST // 6)),
    *BESIDE,
)
"""Limits where nothing runs beside communication: the fewest buckets that memory has room for come first.

With those, calls that compute stay in their order, in which they find what they read in the cache.
"""

SHARE_BESIDE = 0.05
"""What buckets under way may add to a program's peak, as a share of it, where the memory budget has room for them."""

SHARE_ALONE = 0.15
"""The same where nothing runs beside communication. One bucket in place of four saves 1.5 % of the step of a small BERT
on CPUs, and adds 12 % to its peak; DistributedDataParallel, which always holds all gradients, needs a further 6 %."""


def limits_on(cluster: Cluster | None) -> tuple[Sequence[InFlight], float]:
    """The limits to try, and the share of the peak that buckets may add; communication overlaps on no cluster."""
    runs_alone = cluster is not None and overlap_of(cluster) is None
    return (ALONE, SHARE_ALONE) if runs_alone else (BESIDE, SHARE_BESIDE)
