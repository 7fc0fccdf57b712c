"""Prices the kernels that could replace calls of a lowered program, without writing generated kernels.

The pass changes only the metadata of nodes:

* The last call of each group that a kernel would replace gets the kernel's `KernelUse` (`KERNEL`).
* All calls of the group get `PART_LEFT` 0: they take no time of their own.
* If a kernel performs a share of the copies of a reshard, `PART_LEFT` of the reshard's calls is 1 minus this share.

A kernel for a group takes

    launches * launch latency + max(time of matrix products, bytes / bandwidth)

with the matrix products among the group's calls. A kernel for a single operator takes the operator's time.

A traced call may be lowered to several local calls, and a kernel may replace only some of the local calls. The kernel
then saves a share of the traced call's time: the time of the replaced local calls over the time of all. Here a local
call takes launches * launch latency + bytes / bandwidth.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from autoshard.graphs.copy_nodes import copied, copy_node
from autoshard.graphs.lazy_module import lazy_module
from autoshard.ir.kernels import Kernels, KernelUse
from autoshard.ir.lowered import PhasedProgram
from cost_models.compute import memory_time, work_time
from cost_models.device import Device
from cost_models.operators import work
from passes.lowering.choose_groups import ChosenGroup, choose_groups
from passes.lowering.count_launches import Traffic, is_launch, traffic_of
from passes.lowering.rewrite_phases import rewrite_phases
from passes.strategies.local_tracer import EMITTED_AT, IS_RESHARD, KERNEL, PART_LEFT
from passes.strategies.local_units import LocalUnits
from passes.strategies.operator_names import operator_name
from passes.strategies.tensor_infos import tensor_infos
from passes.verification.expand_kernels import STANDS_FOR, expand_kernels, is_kernel

_Source = tuple[str, str | None]
"""The origin of a local call: (node, None) if it lowers a traced node, (value, reader) if it reshards a value."""


@dataclass(frozen=True, slots=True)
class PriceKernels:
    """Marks the calls that kernels could replace in each phase, with the time of the kernels on `device`."""

    device: Device

    def __call__(self, phased: PhasedProgram) -> PhasedProgram:
        pricing = _Pricing(phased.lowered.graph_module, self.device, LocalUnits.of(phased.lowered))
        return rewrite_phases(phased, pricing.marked)


def marked_kernels(phased: PhasedProgram) -> Kernels:
    """Return the kernels that `PriceKernels` marked, in the order of the phases.

    The field `breakdown_without`, the time without kernels, is left to the caller.
    """
    units = LocalUnits.of(phased.lowered)
    nodes = [node for phase in phased.phases.values() for node in phase.graph.nodes]
    uses = tuple(node.meta[KERNEL] for node in nodes if KERNEL in node.meta)
    total = _counted((node for node in nodes if KERNEL not in node.meta and node.meta.get(PART_LEFT) != 0), units)
    for use in uses:
        total += Traffic(use.launches, use.memory_bytes) * use.times
    without = _counted(phased.lowered.graph_module.graph.nodes, units)
    return Kernels(uses, total.launches, total.memory_bytes, without.launches, without.memory_bytes)


def _counted(nodes: Iterable[fx.Node], units: LocalUnits) -> Traffic:
    """Return the launches and memory traffic of `nodes` in the whole model.

    A node of a repeated unit counts once for each unit for which its unit stands (`units`).
    """
    return sum((traffic_of(node) * units.count(node) for node in nodes if is_launch(node)), Traffic())


@dataclass(slots=True)
class _Pricing:
    program: fx.GraphModule
    device: Device
    units: LocalUnits
    nodes: dict[str, fx.Node] = field(init=False)
    places: dict[str, int] = field(init=False)
    calls: dict[_Source, float] = field(init=False)
    products: dict[Any, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        graph = self.program.graph
        self.nodes = {node.name: node for node in graph.nodes}
        self.places = {node.name: place for place, node in enumerate(graph.nodes)}
        calls = defaultdict[_Source, float](float)
        for node in filter(is_launch, graph.nodes):
            calls[_source(node)] += self._weight(node)
        self.calls = dict(calls)

    def marked(self, phase: fx.GraphModule) -> fx.GraphModule:
        graph, _ = copied(phase.graph.nodes)
        gone = defaultdict[_Source, float](float)
        for chosen in choose_groups(graph, self.device):
            for node in chosen.members:
                node.meta[PART_LEFT] = 0.0
            chosen.members[-1].meta[KERNEL] = self._generated(chosen)
        for node in graph.nodes:
            if is_kernel(node):
                node.meta |= {PART_LEFT: 0.0, KERNEL: self._written(node)}
            for value, reader, share in node.meta[KERNEL].copies if KERNEL in node.meta else ():
                gone[value, reader] += share
        for node in graph.nodes:
            if IS_RESHARD in node.meta and PART_LEFT not in node.meta and _source(node) in gone:
                node.meta[PART_LEFT] = max(0.0, 1.0 - gone[_source(node)])
        return lazy_module(phase, graph)

    def _generated(self, chosen: ChosenGroup) -> KernelUse:
        traffic = chosen.traffic
        members = [self.nodes[node.name] for node in chosen.members]
        results = [node.name for node in chosen.results]
        products = sum(map(self._products_of, members))
        return self._use(chosen.group.name, members, results, chosen.operands, traffic, self._time(traffic, products))

    def _written(self, node: fx.Node) -> KernelUse:
        """Return the `KernelUse` of the hand-written kernel that the call `node` runs."""
        traffic = traffic_of(node)
        results = [user.name for user in node.users if user.target is operator.getitem] or [node.name]
        names = node.meta.get(STANDS_FOR)
        members = [self.nodes[name] for name in names or (node.name,)]
        time_s = self._alone(members[0]) if names is None else self._time(traffic, self._products_within(node))
        target: Any = node.target
        name = target._schema.name.removeprefix("autoshard::")
        held = results if names is not None else [node.name]
        return self._use(name, members, held, node.all_input_nodes, traffic, time_s)

    def _use(
        self,
        name: str,
        members: Sequence[fx.Node],
        results: Sequence[str],
        operands: Iterable[fx.Node],
        traffic: Traffic,
        time_s: float,
    ) -> KernelUse:
        last = self.nodes[max(results, key=self.places.__getitem__)]
        shares = defaultdict[_Source, float](float)
        for node in filter(is_launch, members):
            shares[_source(node)] += self._weight(node) / self.calls[_source(node)]
        shares = {source: min(1.0, round(share, 9)) for source, share in shares.items()}
        gone = sum(map(traffic_of, members), Traffic())
        return KernelUse(
            name=name,
            phase=last.meta["phase"],
            node=last.meta[EMITTED_AT],
            stands_for={name: share for (name, reader), share in shares.items() if reader is None},
            copies=tuple((name, reader, share) for (name, reader), share in shares.items() if reader is not None),
            reads=tuple(dict.fromkeys(item.meta.get("global", item.name) for item in operands)),
            time_s=time_s,
            launches=traffic.launches,
            memory_bytes=traffic.memory_bytes,
            saved_launches=gone.launches - traffic.launches,
            saved_bytes=gone.memory_bytes - traffic.memory_bytes,
            times=self.units.count(last),
        )

    def _weight(self, node: fx.Node) -> float:
        """Return the seconds of one local call, from its launches and memory traffic.

        They weigh the call among all local calls of one traced call.
        """
        return self._time(traffic_of(node), 0.0)

    def _time(self, traffic: Traffic, products_s: float) -> float:
        moved_s = memory_time(traffic.memory_bytes, self.device)
        return traffic.launches * self.device.launch_latency_s + max(products_s, moved_s)

    def _alone(self, node: fx.Node) -> float:
        """Return the seconds of a call as a kernel of its own, by the cost model of its operator."""
        done = work(operator_name(node), *tensor_infos(node), tuple(fx.map_arg(node.args, lambda argument: None)))
        return work_time(done, self.device, operator_name(node))

    def _products_of(self, node: fx.Node) -> float:
        """Return the seconds of arithmetic in a call's matrix products, or 0 for other calls.

        Memory traffic and launches are not included.
        """
        if not is_launch(node):
            return 0.0
        done = work(operator_name(node), *tensor_infos(node), tuple(fx.map_arg(node.args, lambda argument: None)))
        if not done.products:
            return 0.0
        arithmetic = work_time(done._replace(bytes_read=0, bytes_written=0), self.device)
        return arithmetic - done.steps * self.device.launch_latency_s

    def _products_within(self, node: fx.Node) -> float:
        """Return the seconds of the matrix products in all calls that a kernel's call stands for."""
        key = (node.target, fx.map_arg(node.args, lambda operand: _form(operand.meta["val"])))
        if key not in self.products:
            self.products[key] = sum(map(self._products_of, _written_out(node).nodes))
        return self.products[key]


def _source(node: fx.Node) -> _Source:
    return node.meta["global"], node.meta[EMITTED_AT] if IS_RESHARD in node.meta else None


def _written_out(call: fx.Node) -> fx.Graph:
    """Return a graph of the PyTorch calls that the kernel of `call` computes. Its nodes have fake values."""
    graph = fx.Graph()
    operands = {node: graph.placeholder(node.name) for node in call.all_input_nodes}
    for node, placeholder in operands.items():
        placeholder.meta["val"] = node.meta["val"]
    copy_node(graph, call, operands.__getitem__)
    expanded = expand_kernels(lazy_module({}, graph)).graph
    mode: Any = next(node.meta["val"].fake_mode for node in call.all_input_nodes)
    values = iter([node.meta["val"] for node in operands])  # in order: a copied graph may name placeholders anew
    for node in expanded.nodes:
        if node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
            with mode:
                node.meta["val"] = node.target(*args, **kwargs)
        elif node.op == "placeholder":
            node.meta["val"] = next(values)
    return expanded


def _form(value: Any) -> Any:
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value
