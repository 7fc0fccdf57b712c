"""Price calls that a rule's rewrite replaces by other calls, such as a cross-entropy that is split over classes.

The work and the collectives of the replacement are known only from its code. So the replacement is emitted into a graph
of its own, and the nodes of this graph are priced as nodes of a lowered program.
"""

from __future__ import annotations

from autoshard.ir.mesh import Mesh
from autoshard.rules.enumeration import Strategy
from cost_models.hardware import Cluster
from passes.strategies.enumerate_strategies import Site
from passes.strategies.price_nodes import NodePrices
from passes.strategies.scratch import emitted_call


def rewritten_time(site: Site, strategy: Strategy, mesh: Mesh, cluster: Cluster) -> float:
    """Return the seconds on each rank of the calls that replace a call under `strategy`, collectives included."""
    prices = NodePrices(cluster, mesh)
    nodes = emitted_call(site, strategy, mesh).nodes
    return sum(prices.computed_s(node) + prices.sent_s(node) for node in nodes)
