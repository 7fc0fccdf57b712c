"""Price what kernels save within the local form of a call that communicates: a cross-entropy over a split vocabulary.

Such a call is several operators on each rank, between collectives, and kernels stand in for these as for any others
(`passes/lowering/price_kernels.py`, `price_within`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from autoshard.rules.enumeration import Strategy
from passes.solver.assignment import Floats
from passes.strategies.enumerate_strategies import SearchSpace, Site
from passes.strategies.price import Prices


@dataclass(frozen=True, slots=True)
class Within:
    """What kernels do of a call's local form.

    Args:
        share: of its computation that goes.
        launches, time_s: of the kernels.
    """

    share: float
    launches: int
    time_s: float


PriceWithin = Callable[[Site, Strategy], Within]


def saved_within(space: SearchSpace, prices: Prices, price_within: PriceWithin) -> dict[str, Floats]:
    """Seconds that kernels save within local forms that communicate, [strategies], by site; alike calls share them."""
    found: dict[tuple[int, int], Floats] = {}
    for site in space.sites.values():
        key = site.call, id(site.strategies)
        if site.rule is not None and site.rule.communicates and key not in found:
            found[key] = _saved_of(site, prices, price_within)
    saving = {key for key, saved in found.items() if saved.any()}
    keys = {site.name: (site.call, id(site.strategies)) for site in space.sites.values()}
    return {name: found[key] for name, key in keys.items() if key in saving}


def _saved_of(site: Site, prices: Prices, price_within: PriceWithin) -> Floats:
    """Seconds that kernels save within a call's local form where it communicates, [strategies].

    They are found for one strategy; what kernels move is as much of what the call does under the others.
    """
    sent = [sum(item[1] for item in prices.collectives_inside(site, strategy)) for strategy in site.strategies]
    places = np.flatnonzero(sent)
    saved = np.zeros(len(site.strategies))
    if len(places):
        computed = prices.call_times(site, site.strategies) - sent
        within = price_within(site, site.strategies[places[0]])
        started_s = within.launches * prices.cluster.device.launch_latency_s
        moved = (within.time_s - started_s) / computed[places[0]]
        saved[places] = (within.share - moved) * computed[places] - started_s
    return saved
