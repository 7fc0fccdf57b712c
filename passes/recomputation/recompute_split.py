"""A search space in which values of the forward have two lives: one in the forward, and one after it.

Each site (node) with several policies has a second site after the forward with the same value, for all later readers
(`late`). For each policy that restores the value, one more site stands where the value is restored (`restored`). A
recomputation reads operands, and a fetch from the host reads none. So lifetimes in this space cover both lives of a
value, and the operands of recomputations.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from autoshard.ir.recompute import PHASE
from passes.recomputation.forward_calls import is_late
from passes.recomputation.recompute_options import RECOMPUTED, RESTORED, RecomputeOptions, ValuePolicy
from passes.strategies.enumerate_strategies import SearchSpace, Site


@dataclass(frozen=True, slots=True)
class SplitSpace:
    """A search space in which values of the forward have two lives: one in the forward, and one after it.

    Args:
        space: the sites and links. The first links are those of the original space, in order.
        late: name of a site → the site that has the same value after the forward.
        restored: (name of a site, policy) → the site that restores the value under this policy.
        sources: name of a site in `late` or `restored` → its original site, and the policy under which it exists (None:
            any policy).
    """

    space: SearchSpace
    late: Mapping[str, str]
    restored: Mapping[tuple[str, ValuePolicy], str]
    sources: Mapping[str, tuple[str, ValuePolicy | None]]

    def origin(self, name: str) -> tuple[str, ValuePolicy | None]:
        """Return the original of a site, and the policy under which the site exists; None: under any policy.

        A site of the original space is its own original.
        """
        return self.sources.get(name, (name, None))


def split_space(space: SearchSpace, options: RecomputeOptions, classes: Mapping[str, int]) -> SplitSpace:
    """Return the search space in which values with several policies have two lives.

    `classes` has the variable of each site.
    """
    kept = [name for name in space.sites if classes[name] in options.policies]
    late = {name: f"{name}, late" for name in kept}
    restored = {
        (name, policy): f"{name}, {policy.value} again"
        for name in kept
        for policy in options.policies[classes[name]]
        if policy in RESTORED
    }
    sources = {copy: (name, None) for name, copy in late.items()}
    sources |= {copy: (name, policy) for (name, policy), copy in restored.items()}
    sites = dict(_sites(space, options, late, restored))
    moved = [
        dataclasses.replace(link, tail=late[link.tail]) if link.tail in late and is_late(space, link) else link
        for link in space.links
    ]
    added = [
        dataclasses.replace(link, tail=late.get(link.tail, link.tail), head=restored[link.head, policy])
        for link in space.links
        for policy in RECOMPUTED
        if (link.head, policy) in restored
    ]
    whole = dataclasses.replace(space, sites=sites, links=(*moved, *added))
    return SplitSpace(whole, late, restored, sources)


def _sites(
    space: SearchSpace,
    options: RecomputeOptions,
    late: Mapping[str, str],
    restored: Mapping[tuple[str, ValuePolicy], str],
) -> Iterator[tuple[str, Site]]:
    """Yield the sites of the split space by name, in program order.

    The sites of second lives stand right after the forward, and restoring sites stand where their policies restore
    values.
    """
    before: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for (name, policy), copy in restored.items():
        before[options.anchors[name][policy]].append((name, copy))
    forward = [name for name, site in space.sites.items() if site.node is not None and site.phase == "forward"]
    calls = [name for name in forward if not space.sites[name].is_input]
    for name, site in space.sites.items():
        for original, copy in before[name]:
            yield copy, dataclasses.replace(space.sites[original], name=copy, phase=PHASE)
        yield name, site
        if calls and name == calls[-1]:
            for original, copy in late.items():
                yield copy, _second_life(space.sites[original], copy)


def _second_life(site: Site, name: str) -> Site:
    """Return a site `name` after the forward with the value of a forward site.

    The site of a view is a view of the same value. Every other site is a copy.
    """
    assert site.node is not None, "calls have nodes"
    node = site.node
    if not site.is_alias:
        node = fx.Graph().call_function(torch.ops.aten.clone.default)
        node.meta = {**site.node.meta, "phase": PHASE}
    return dataclasses.replace(site, name=name, node=node, phase=PHASE)
