"""Cut the forward into segments.

A value is recomputed from values of its own segment, and from values that enter it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby

from passes.strategies.enumerate_strategies import Site
from passes.strategies.fold_blocks import numbered_blocks


def segments(sites: Sequence[Site]) -> Mapping[str, int]:
    """Return the number of the segment of each forward site, by the site's name.

    A segment is a repeated block (the outermost numbered module with at least two matrix products), or a run of sites
    outside of blocks. `sites` is in program order.
    """
    blocks = numbered_blocks(sites)
    found: dict[str, int] = {}
    for number, (_, run) in enumerate(groupby(sites, lambda site: _block(site, blocks))):
        found |= {site.name: number for site in run}
    return found


def block_segments(sites: Sequence[Site]) -> Mapping[str, int]:
    """Return the numbers that `segments` gives to sites in repeated blocks, without sites outside of blocks."""
    blocks, found = numbered_blocks(sites), segments(sites)
    return {site.name: found[site.name] for site in sites if _block(site, blocks)}


def _block(site: Site, blocks: Collection[str]) -> str:
    assert site.node is not None, "calls have nodes"
    parts = site.node.meta.get("module", "").split(".")
    paths = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return next((path for path in paths if path in blocks), "")
