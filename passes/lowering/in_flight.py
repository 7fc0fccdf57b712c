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
    """Limits of the passes that overlap collectives with computation.

    Args:
        starts_soon: move collectives of values up, past calls that compute.
        buckets: the sizes of buckets; None: no buckets.
        ahead: number of gathers for `StartAhead`.
        most_held: number of reductions for `WaitInTurn`.
    """

    starts_soon: bool = True
    buckets: BucketCollectives | None = field(default_factory=BucketCollectives)
    ahead: int = 1
    most_held: int | None = None


FEWEST = 12 * MIB
"""Largest piece of a rank in a bucket without overlap. Larger buckets would gain little. A CPU's C library also returns
freed memory of 32 MiB and more to the system, and allocates it anew at each step.
"""

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
"""Limits without overlap. Rows with the fewest buckets come first.

Calls that compute keep their order, in which their operands are in the cache.
"""

SHARE_BESIDE = 0.05
"""Most growth of a program's peak by buckets under way, as a share, within the memory budget."""

SHARE_ALONE = 0.15
"""The share without overlap. One bucket in place of four saves 1.5 % of the step of a small BERT on CPUs, and adds 12 %
to
its peak. DistributedDataParallel, which always stores all gradients, needs a further 6 %.
"""


def limits_on(cluster: Cluster | None) -> tuple[Sequence[InFlight], float]:
    """The limits to try, and the share of the peak that buckets may add; communication overlaps on no cluster."""
    runs_alone = cluster is not None and overlap_of(cluster) is None
    return (ALONE, SHARE_ALONE) if runs_alone else (BESIDE, SHARE_BESIDE)
