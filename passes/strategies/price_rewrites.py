"""The communication inside a call: some local rewrites reduce over an axis themselves (cross-entropy over classes).

What a rewrite sends is known only from what it emits, so it is emitted into a scratch graph, and each collective
found there is priced by the bytes of its local operand.
"""

from __future__ import annotations

import torch
from torch import fx

from autoshard.ir.mesh import Mesh
from autoshard.rules.enumeration import Strategy
from cost_models.collectives import all_gather_time, all_reduce_time
from cost_models.errors import UnknownOperatorError
from cost_models.hardware import Cluster
from passes.strategies.enumerate_strategies import Site
from passes.strategies.scratch import emitted_call

_ALL_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
_ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default


def rewrite_time(site: Site, strategy: Strategy, mesh: Mesh, cluster: Cluster) -> float:
    """Seconds that the collectives of a call's local rewrite take; 0 for a call whose rewrite has none.

    Raises:
        UnknownOperatorError: the rewrite emits a collective that has no formula here.
    """
    return sum(seconds for _, seconds in rewrite_collectives(site, strategy, mesh, cluster))


def rewrite_collectives(site: Site, strategy: Strategy, mesh: Mesh, cluster: Cluster) -> tuple[tuple[str, float], ...]:
    """Mesh axis and seconds of each collective of a call's local rewrite, in order; see `rewrite_time`."""
    nodes = emitted_collectives(site, strategy, mesh)
    return tuple((str(node.args[-1]), _time(node, mesh, cluster)) for node in nodes)


def emitted_collectives(site: Site, strategy: Strategy, mesh: Mesh) -> list[fx.Node]:
    """The collectives of a call's local rewrite, in order, over local values; the last argument is the axis."""
    if site.rule is None or site.rule.local is None or not strategy.splits(mesh):
        return []
    return [node for node in emitted_call(site, strategy, mesh).nodes if _is_collective(node)]


def _time(node: fx.Node, mesh: Mesh, cluster: Cluster) -> float:
    operand, _, axis = node.args
    assert isinstance(operand, fx.Node)
    value = operand.meta["val"]
    operand_bytes = value.numel() * value.element_size()
    group = cluster.group_links(dict(mesh.axes), (str(axis),))
    if node.target is _ALL_REDUCE:
        return all_reduce_time(operand_bytes, group)
    if node.target is _ALL_GATHER:
        return all_gather_time(operand_bytes * mesh.axis_size(str(axis)), group)
    raise UnknownOperatorError(f"{node.target} inside a local rewrite has no cost formula; add one here.")


def _is_collective(node: fx.Node) -> bool:
    return str(node.target).startswith("_c10d_functional.") and node.target is not _WAIT
