"""Lists of limits on the communication that is under way at once, from the loosest limits to the strictest.

Collectives under way hold memory. `passes.lowering.overlap` takes for each phase the first limits of a list with which
the program fits in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cost_models.hardware import Cluster
from cost_models.streams import overlap_of
from passes.lowering.bucket_collectives import MIB, BucketCollectives


@dataclass(frozen=True, slots=True)
class InFlight:
    """Options of the passes that overlap collectives with computation.

    Args:
        starts_soon: run `StartSoon`, which moves collectives of activations up, past calls that compute.
        buckets: the pass that puts collectives into buckets, with the sizes of buckets. None: no buckets.
        ahead: `by` of `StartAhead`: the number of later gathers that have started when the device waits for a gather.
        most_held: `most_held` of `WaitInTurn`: the largest number of reduce-scatters under way at once.
    """

    starts_soon: bool = True
    buckets: BucketCollectives | None = field(default_factory=BucketCollectives)
    ahead: int = 1
    most_held: int | None = None


LARGEST_PIECE_BYTES = 12 * MIB
"""Bytes of one rank's piece of the largest bucket if communication does not overlap.

Larger buckets would save little latency. The C library of a CPU returns freed memory of 32 MiB and more to the system.
It would allocate a larger bucket anew at each step.
"""

WITH_OVERLAP: Sequence[InFlight] = (
    InFlight(),
    InFlight(most_held=2),
    InFlight(buckets=BucketCollectives(most_bytes=2 * MIB), most_held=2),
    InFlight(buckets=BucketCollectives(most_bytes=MIB // 2), most_held=2),
    InFlight(starts_soon=False, buckets=None, most_held=2),
    InFlight(starts_soon=False, buckets=None, ahead=0, most_held=1),
)
"""Limits on collectives under way if communication overlaps with computation, the loosest limits first."""

WITHOUT_OVERLAP: Sequence[InFlight] = (
    *(
        InFlight(starts_soon=False, buckets=BucketCollectives(None, size, size))
        for size in (LARGEST_PIECE_BYTES, LARGEST_PIECE_BYTES // 3, LARGEST_PIECE_BYTES // 6)
    ),
    *WITH_OVERLAP,
)
"""Limits on collectives under way if communication does not overlap with computation, the fewest buckets first.

The first limits leave `StartSoon` out, so that calls find their operands in the cache. `WITH_OVERLAP` follows.
"""

SHARE_WITH_OVERLAP = 0.05
"""Largest share of the peak memory that collectives under way may add to the peak, if they overlap with computation.

The memory budget limits the growth too.
"""

SHARE_WITHOUT_OVERLAP = 0.15
"""Largest share of the peak memory that collectives under way may add to the peak, if they do not overlap.

One bucket in place of four saves 1.5 % of the step of a small BERT on CPUs, and adds 12 % to its peak.
DistributedDataParallel, which always stores all gradients, needs a further 6 %.
"""


def limits_on(cluster: Cluster | None) -> tuple[Sequence[InFlight], float]:
    """Return the limits to try on a cluster, in order, and the growth of the peak memory to allow.

    The limits are on collectives under way. The growth is the most that these collectives may add to the peak memory,
    as a share of the peak without them. If `cluster` is None, communication is taken to overlap with computation.
    """
    overlaps = cluster is None or overlap_of(cluster) is not None
    return (WITH_OVERLAP, SHARE_WITH_OVERLAP) if overlaps else (WITHOUT_OVERLAP, SHARE_WITHOUT_OVERLAP)
