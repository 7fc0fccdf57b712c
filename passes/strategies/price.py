"""Price a search space with the cost models: seconds of strategies and reshards, bytes of values.

A call takes the time of its roofline. A collective takes a latency and a time per byte (`cost_models`). The search adds
up the seconds of computation and communication. Only the prediction of the lowered program lets computation and
communication overlap (`passes.prediction`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import fx

from autoshard.ir.mesh import Mesh
from autoshard.ir.reshard import ReshardKind, ReshardStep, reshard_costs
from autoshard.ir.spec import PartitionSpec
from autoshard.kernels.offload import TRANSFERS, to_host
from autoshard.rules.emit_local import fills
from autoshard.rules.enumeration import Choice, Strategy
from autoshard.rules.fan_out import fan_out
from cost_models.collectives import all_gather_time, all_reduce_time, all_to_all_time, reduce_scatter_time
from cost_models.compute import accumulation_time, memory_time, work_time
from cost_models.hardware import Cluster
from cost_models.operators import work
from cost_models.topology import GroupLinks
from cost_models.work import TensorInfo
from passes.solver.assignment import Floats
from passes.strategies.enumerate_strategies import Site, ValueInfo, is_view, operands_of, specs_of
from passes.strategies.operator_names import dtype_name, operator_name
from passes.strategies.price_nodes import STRIDED_COPY
from passes.strategies.price_rewrites import rewritten_time


@dataclass(frozen=True, slots=True)
class StepPrice:
    """The seconds of a reshard step on a cluster, as a price for `plan_reshard`.

    The ranks of `mesh` are the devices of the cluster, in the order of the mesh's rows.
    """

    cluster: Cluster
    mesh: Mesh

    def __call__(self, step: ReshardStep) -> float:
        sent_s, copied_s = self.parts(step)
        return sent_s + copied_s

    def parts(self, step: ReshardStep) -> tuple[float, float]:
        """Return the seconds of the step's collective (0 for a local step), and the seconds of its copies on a rank."""
        group = self.cluster.group_links(dict(self.mesh.axes), (step.axis,))
        copied = memory_time(step.bytes_before + step.bytes_after, self.cluster.device, STRIDED_COPY)
        return _collective_time(step, group), copied


def _collective_time(step: ReshardStep, group: GroupLinks) -> float:
    match step.kind:
        case ReshardKind.ALL_GATHER:
            return all_gather_time(step.bytes_before * step.axis_size, group)
        case ReshardKind.REDUCE_SCATTER:
            return reduce_scatter_time(step.bytes_before, group)
        case ReshardKind.ALL_REDUCE:
            return all_reduce_time(step.bytes_before, group)
        case ReshardKind.ALL_TO_ALL:
            return all_to_all_time(step.bytes_before, group)
    return 0.0


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices of strategies and reshards on one cluster and mesh, cached so that equal calls are priced once.

    `derived` is a cache for prices that other modules compute from these `Prices`.
    """

    cluster: Cluster
    mesh: Mesh
    derived: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    _calls: dict[Any, float] = field(default_factory=dict, repr=False)
    _locals: dict[Any, TensorInfo] = field(default_factory=dict, repr=False)
    _reshards: dict[Any, Floats] = field(default_factory=dict, repr=False)
    _choices: dict[Any, tuple[Choice, ...]] = field(default_factory=dict, repr=False)

    @property
    def step_price(self) -> StepPrice:
        """The price of a reshard step on this cluster and mesh, in seconds, for `plan_reshard`."""
        return StepPrice(self.cluster, self.mesh)

    def call_time(self, site: Site, strategy: Strategy) -> float:
        """Return the seconds of one run of a call on each rank under a strategy; zero for placeholders and results."""
        return float(self.call_times(site, (strategy,))[0])

    def call_times(self, site: Site, strategies: Sequence[Strategy]) -> Floats:
        """Return the seconds of one run of a call on each rank under each of `strategies`, [strategies]."""
        node = site.node
        if node is None or node.op != "call_function" or node.target is fan_out:
            return np.zeros(len(strategies))
        if node.target in TRANSFERS:
            return self._transfer_times(site, strategies)
        operands = [_info(operand.meta["val"]) for operand in operands_of(node)]
        arguments = tuple(fx.map_arg(node.args, lambda argument: None))
        call = (str(node.target), repr(arguments))
        return np.array([self._call_time(site, operands, arguments, call, strategy) for strategy in strategies])

    def _transfer_times(self, site: Site, strategies: Sequence[Strategy]) -> Floats:
        """Return the seconds of a copy to or from the host under each strategy, [strategies].

        `site` is such a copy. No computation hides the copy.
        """
        assert site.node is not None, "calls have nodes"
        device = self.cluster.device
        time = device.to_host_time if site.node.target is to_host else device.from_host_time
        specs = tuple(strategy.outputs[0] for strategy in strategies)
        return np.array([time(size) for size in local_bytes_of(site.results[0], specs, self.mesh).tolist()])

    def host_times(self, sizes: Floats) -> Floats:
        """Return the seconds to copy a value to the host and back, for each of the given sizes in bytes, [sizes]."""
        device = self.cluster.device
        return np.array([device.to_host_time(size) + device.from_host_time(size) for size in sizes.tolist()])

    def adding_times(self, site: Site) -> Floats:
        """Return the seconds to add the first result of `site`, a gradient, to its sum on each rank, [strategies]."""
        sizes = local_bytes_of(site.results[0], specs_of(site, 0), self.mesh)
        return np.array([accumulation_time(size, self.cluster.device) for size in sizes.tolist()])

    def _call_time(
        self,
        site: Site,
        operands: Sequence[ValueInfo],
        arguments: tuple[Any, ...],
        call: tuple[str, str],
        strategy: Strategy,
    ) -> float:
        inputs = tuple(map(self._local, operands, strategy.inputs))
        outputs = tuple(map(self._local, site.results, strategy.outputs))
        choices = self._canonical_order(strategy.choices) if _is_rewritten(site, strategy, self.mesh) else None
        filled = _fill_counts(site, strategy, self.mesh)
        key = (call, inputs, outputs, choices, filled)
        if key not in self._calls:
            assert site.node is not None
            if choices:
                self._calls[key] = rewritten_time(site, strategy, self.mesh, self.cluster)
            else:
                name = operator_name(site.node)
                done = work(name, inputs, outputs, arguments)
                self._calls[key] = work_time(done, self.cluster.device, name) + self._fill_time(filled, inputs)
        return self._calls[key]

    def _canonical_order(self, choices: tuple[Choice, ...]) -> tuple[Choice, ...]:
        """Return `choices`, with the choices of axes of equal size and equal links in a fixed order.

        Strategies that differ only by an exchange of such axes cost the same, so they are priced once.
        """
        if not choices or not _has_equal_axes(self.mesh, self.cluster):
            return choices
        if choices not in self._choices:
            ordered = list(choices)
            for places in _equal_axes(self.mesh):
                for place, choice in zip(places, sorted((choices[i] for i in places), key=repr), strict=True):
                    ordered[place] = choice
            self._choices[choices] = tuple(ordered)
        return self._choices[choices]

    def _fill_time(self, filled: tuple[tuple[int, int], ...], inputs: tuple[TensorInfo, ...]) -> float:
        """Return the seconds to write neutral values into the padding of a call's local operands, before the call.

        `filled` has pairs of an operand's index and the number of its padded factors, each of which reads and writes
        the operand's piece once.
        """
        sizes = [(count, math.prod(inputs[operand].shape) * inputs[operand].itemsize) for operand, count in filled]
        return sum(count * memory_time(2 * size, self.cluster.device) for count, size in sizes)

    def _local(self, value: ValueInfo, spec: PartitionSpec) -> TensorInfo:
        key = (value.shape, value.dtype, spec.dims)
        if key not in self._locals:
            shape = spec.local_shape(value.shape, self.mesh)
            self._locals[key] = TensorInfo(shape, value.itemsize, dtype_name(value.dtype))
        return self._locals[key]

    def reshard_table(
        self, value: ValueInfo, sources: tuple[PartitionSpec, ...], targets: tuple[PartitionSpec, ...]
    ) -> Floats:
        """Return the seconds to reshard `value` from each source spec to each target spec, [sources, targets]."""
        key = (value.shape, value.itemsize, sources, targets)
        if key not in self._reshards:
            self._reshards[key] = reshard_costs(
                sources, targets, value.shape, self.mesh, value.itemsize, self.step_price
            )
        return self._reshards[key]


_FEW_AXES = 2
"""On meshes with more axes than this, strategies that differ by a permutation of equal axes share a price."""


def _has_equal_axes(mesh: Mesh, cluster: Cluster) -> bool:
    """Whether strategies that differ by a permutation of axes of equal size share a price.

    True on a mesh of more than `_FEW_AXES` axes within one node, where equal axes are taken to have equal links.
    """
    return len(mesh.axes) > _FEW_AXES and cluster.nodes == 1


def _equal_axes(mesh: Mesh) -> list[list[int]]:
    return [[i for i, size in enumerate(mesh.shape) if size == each] for each in dict.fromkeys(mesh.shape)]


def local_bytes(value: ValueInfo, spec: PartitionSpec, mesh: Mesh) -> int:
    """Return the bytes of a value on each rank under `spec`, its padding included."""
    return math.prod(spec.local_shape(value.shape, mesh)) * value.itemsize


def local_bytes_of(value: ValueInfo, specs: tuple[PartitionSpec, ...], mesh: Mesh) -> Floats:
    """Return the bytes of a value on each rank under each of `specs`, [specs]."""
    return np.array([local_bytes(value, spec, mesh) for spec in specs], dtype=np.float64)


def _is_rewritten(site: Site, strategy: Strategy, mesh: Mesh) -> bool:
    """Whether the sharding rule replaces the traced call by other calls on each rank. A view counts as not replaced."""
    is_split = site.rule is not None and site.rule.local is not None and bool(strategy.splits(mesh))
    return is_split and not (site.node is not None and is_view(site.node))


def _fill_counts(site: Site, strategy: Strategy, mesh: Mesh) -> tuple[tuple[int, int], ...]:
    """Return pairs of an operand's index, and the number of its factors whose padding is filled before the call.

    A factor is an index of the sharding rule.
    """
    if site.rule is None or not site.rule.padding:
        return ()
    wanted = fills(site.rule, strategy.splits(mesh), mesh)
    return tuple((operand, len(factors)) for operand, factors in wanted.items())


def _info(value: torch.Tensor) -> ValueInfo:
    return ValueInfo(tuple(value.shape), value.dtype)
