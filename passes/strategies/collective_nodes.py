"""Read the collectives of a lowered program: the mesh axes of each group, the bytes that a rank sends, and the time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import fx

from autoshard.ir.collectives import is_collective
from autoshard.ir.communicators import group_axes
from autoshard.ir.mesh import Mesh
from cost_models.collectives import all_gather_time, all_reduce_time, all_to_all_time, reduce_scatter_time
from cost_models.errors import UnknownOperatorError
from cost_models.exchanges import Exchanged
from cost_models.hardware import Cluster
from cost_models.operators import EXCHANGES
from cost_models.topology import GroupLinks
from passes.strategies.enumerate_strategies import operands_of
from passes.strategies.local_tracer import TIMES_AS_LARGE
from passes.strategies.tensor_infos import operand_infos

_TIMES: Mapping[str, Callable[[float, GroupLinks], float]] = MappingProxyType(
    {
        "all_reduce": all_reduce_time,
        "all_gather_into_tensor": all_gather_time,
        "reduce_scatter_tensor": reduce_scatter_time,
        "all_to_all_single": all_to_all_time,
    }
)


class Collective(NamedTuple):
    """A collective of a lowered program.

    Args:
        kind: "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor" or "all_to_all_single".
        axes: the mesh axes of the process group.
        whole_bytes: bytes of the operand or of the result on each rank, whichever is larger.
        sent_bytes: bytes that each rank sends with ring algorithms (`autoshard.ir.reshard.bytes_sent`).
    """

    kind: str
    axes: tuple[str, ...]
    whole_bytes: int
    sent_bytes: float


def collective_of(node: fx.Node, mesh: Mesh) -> Collective:
    """Return the collective that a node starts.

    For a call that exchanges rows, return one all-to-all for all its exchanges.

    Raises:
        UnknownOperatorError: a collective of this kind has no cost formula.
    """
    if exchanges(node):
        sent, axes = exchanged(node), group_axes(str(node.args[-1]))
        whole, ranks = sum(each.size_bytes for each in sent), mesh.shards(axes)
        return Collective("all_to_all_single", axes, round(whole), sum(each.sent_bytes(ranks) for each in sent))
    target: Any = node.target
    kind = target._schema.name.partition("::")[2].removesuffix("_").removesuffix("_coalesced")
    if kind not in _TIMES:
        raise UnknownOperatorError(f"{target} (node {node.name!r}) has no cost formula; add one in {__name__}.")
    axes = group_axes(str(node.args[-1]))
    size, values = math.prod(map(mesh.axis_size, axes)), [operand.meta["val"] for operand in operands_of(node)]
    operand_bytes = sum(value.numel() * value.itemsize for value in values)
    whole = operand_bytes * size if kind == "all_gather_into_tensor" else operand_bytes
    return Collective(kind, axes, whole, (2 if kind == "all_reduce" else 1) * (size - 1) / size * whole)


def exchanges(node: fx.Node) -> bool:
    """Whether a call sends rows to other ranks while it runs, as ring attention does (`autoshard.kernels.exchange`)."""
    return str(node.target) in EXCHANGES


def exchanged(node: fx.Node) -> list[Exchanged]:
    """Return the exchanges inside a call for which `exchanges` is true, in the order in which they run."""
    return EXCHANGES[str(node.target)](operand_infos(node), tuple(fx.map_arg(node.args, lambda argument: None)))


def communicates(node: fx.Node) -> bool:
    """Whether a node starts a collective or exchanges rows between ranks."""
    return is_collective(node) or exchanges(node)


def collective_time(node: fx.Node, mesh: Mesh, cluster: Cluster) -> float:
    """Return the seconds of the collective that a node starts.

    If the collective is a bucket, members of left-out blocks count too.
    """
    sent, links = collective_of(node, mesh), group_axes(str(node.args[-1]))
    return _TIMES[sent.kind](size_in_whole_program(node, sent.whole_bytes), cluster.group_links(dict(mesh.axes), links))


def size_in_whole_program(node: fx.Node, size: float) -> float:
    """Return the bytes that a collective of `size` bytes has in the whole model.

    If the collective is a bucket, members of left-out blocks count there too.
    """
    return size * node.meta.get(TIMES_AS_LARGE, 1.0)
