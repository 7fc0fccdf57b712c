"""Calls whose local rewrite communicates: some reduce over an axis themselves (cross-entropy over classes).

What a rewrite computes and sends is known only from what it emits, so it is emitted into a scratch graph, whose nodes
are priced as those of a lowered program.
"""

from __future__ import annotations

from torch import fx

from autoshard.ir.mesh import Mesh
from autoshard.rules.enumeration import Strategy
from cost_models.hardware import Cluster
from passes.strategies.collective_nodes import collective_of, communicates
from passes.strategies.enumerate_strategies import Site
from passes.strategies.price_nodes import NodePrices
from passes.strategies.scratch import emitted_call


def rewritten_time(site: Site, strategy: Strategy, mesh: Mesh, cluster: Cluster) -> float:
    """Seconds of a call's local form, its collectives included."""
    prices = NodePrices(cluster, mesh)
    nodes = emitted_call(site, strategy, mesh).nodes
    return sum(prices.computed_s(node) + prices.sent_s(node) for node in nodes)


def rewrite_collectives(site: Site, strategy: Strategy, mesh: Mesh, cluster: Cluster) -> tuple[tuple[str, float], ...]:
    """Mesh axis and seconds of each collective of a call's local rewrite, in order; none for a rewrite without any.

    Raises:
        UnknownOperatorError: the rewrite emits a collective that has no formula.
    """
    nodes, prices = emitted_collectives(site, strategy, mesh), NodePrices(cluster, mesh)
    return tuple((collective_of(node, mesh).axes[0], prices.sent_s(node)) for node in nodes)


def emitted_collectives(site: Site, strategy: Strategy, mesh: Mesh) -> list[fx.Node]:
    """Nodes of a call's local rewrite that communicate, in order, over local values; the last argument is the group."""
    if site.rule is None or site.rule.local is None or not strategy.splits(mesh):
        return []
    return [node for node in emitted_call(site, strategy, mesh).nodes if communicates(node)]
