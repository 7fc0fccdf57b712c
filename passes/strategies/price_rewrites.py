"""Price calls whose local form communicates, such as a cross-entropy that is split over classes.

Only the emitted code tells the work of a local form. So the form is emitted into a scratch graph, and the nodes of the
graph are priced as nodes of a lowered program.
"""

from __future__ import annotations

from autoshard.ir.mesh import Mesh
from autoshard.rules.enumeration import Strategy
from cost_models.hardware import Cluster
from passes.strategies.enumerate_strategies import Site
from passes.strategies.price_nodes import NodePrices
from passes.strategies.scratch import emitted_call


def rewritten_time(site: Site, strategy: Strategy, mesh: Mesh, cluster: Cluster) -> float:
    """Seconds of a call's local form, its collectives included."""
    prices = NodePrices(cluster, mesh)
    nodes = emitted_call(site, strategy, mesh).nodes
    return sum(prices.computed_s(node) + prices.sent_s(node) for node in nodes)
