"""Price the nodes of a lowered program with the cost models, in agreement with `passes.strategies.price`.

* A call takes the seconds of `cost_models.operators` for its local operands and results.
* A collective takes the seconds of `cost_models.collectives` on the links of its group.
* A bucket also takes the seconds to copy its members into the bucket. Members that are computed directly into the
  bucket are not copied (`fill_buckets`). A member that is split along a dim other than the first is copied once more.
* A call that exchanges rows with other ranks also takes the seconds for which it waits for the rows.
* A step of a reshard reads its operand and writes its result once (`StepPrice`). The calls that emit the step
  (`autoshard.ir.emit`) are not priced one by one.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from autoshard.graphs.fill_buckets import members_of
from autoshard.ir.collectives import is_collective, is_wait
from autoshard.ir.communicators import group_axes
from autoshard.ir.mesh import Mesh
from autoshard.kernels.native import SEMANTIC
from autoshard.kernels.offload import TRANSFERS, to_host
from cost_models.compute import memory_time, work_time
from cost_models.hardware import Cluster
from cost_models.operators import work
from cost_models.streams import overlap_of
from passes.strategies.collective_nodes import collective_time, exchanged, exchanges
from passes.strategies.enumerate_strategies import operands_of
from passes.strategies.local_tracer import IS_RESHARD
from passes.strategies.tensor_infos import bytes_in, tensor_infos

_aten = torch.ops.aten

STRIDED_COPY = "aten.clone.default"
"""Name of the operator whose bandwidth prices the copies of a reshard."""


@dataclass(frozen=True, slots=True)
class NodePrices:
    """Seconds of lowered programs' nodes on one rank, cached so that equal calls are priced once."""

    cluster: Cluster
    mesh: Mesh
    _calls: dict[Any, float] = field(default_factory=dict, repr=False)

    def sent_s(self, node: fx.Node) -> float:
        """Return the seconds of the collective that a node starts, or of a call's wait for exchanged rows.

        The result is 0 for all other nodes.
        """
        if exchanges(node):
            links = self.cluster.group_links(dict(self.mesh.axes), group_axes(str(node.args[-1])))
            computed_s, slowdown = self.computed_s(node), overlap_of(self.cluster)
            return sum(each.waited_s(links, computed_s, slowdown) for each in exchanged(node))
        return collective_time(node, self.mesh, self.cluster) if is_collective(node) else 0.0

    def computed_s(self, node: fx.Node) -> float:
        """Return the seconds of a rank's own computation and copies at a node, without communication.

        For the collective of a reshard, these are the copies before and after it. The result is 0 for waits, and for
        nodes that are no ATen or semantic operator.
        """
        if not isinstance(node.target, OpOverload) or is_wait(node):
            return 0.0
        if IS_RESHARD in node.meta:
            return self._copied_s(node)
        if is_collective(node):
            return 0.0
        if members := members_of(node):
            copied = sum(member.size_bytes for member in members if member.computed is None)
            return self._called_s(node, str(node.target)) * copied / bytes_in(node.meta["val"])
        target = SEMANTIC.get(node.target, node.target)
        if target in TRANSFERS:
            device, size = self.cluster.device, bytes_in(node.meta["val"])
            return device.to_host_time(size) if target is to_host else device.from_host_time(size)
        return self._called_s(node, str(target))

    def _copied_s(self, node: fx.Node) -> float:
        if _is_copied_for_bucket(node):
            return memory_time(2 * bytes_in(node.meta["val"]), self.cluster.device, STRIDED_COPY)
        if not (is_collective(node) or _is_slice(node) or node.target is _aten.where.ScalarOther):
            return 0.0
        before = max(bytes_in(operand.meta["val"]) for operand in operands_of(node))
        return memory_time(before + bytes_in(node.meta["val"]), self.cluster.device, STRIDED_COPY)

    def _called_s(self, node: fx.Node, name: str) -> float:
        arguments = tuple(fx.map_arg(node.args, lambda argument: None))
        inputs, outputs = map(tuple, tensor_infos(node))
        key = (name, repr(arguments), inputs, outputs)
        if key not in self._calls:
            self._calls[key] = work_time(work(name, inputs, outputs, arguments), self.cluster.device, name)
        return self._calls[key]


def _is_slice(node: fx.Node) -> bool:
    """Whether a node is a `narrow` to the rank's own piece.

    Its start is a node that is computed from the rank's index.
    """
    return node.target is _aten.narrow.default and isinstance(node.args[2], fx.Node)


def _is_copied_for_bucket(node: fx.Node) -> bool:
    """Whether a node of a reshard copies a value to lay it out for a bucket, or copies it out of a bucket."""
    if node.target is not _aten.contiguous.default or operands_of(node)[0].meta["val"].is_contiguous():
        return False
    made, (given,) = node, node.all_input_nodes
    while len(made.users) == 1 and next(iter(made.users)).target is _aten.view.default:
        (made,) = made.users
    while given.target in (_aten.view.default, _aten.permute.default, operator.getitem):
        given = given.all_input_nodes[0]
    return given.target is _aten.split_with_sizes_copy.default or any(
        user.target is _aten.cat.default for user in made.users
    )
