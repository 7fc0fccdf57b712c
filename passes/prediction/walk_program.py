"""Read the step of one rank off its lowered program, as segments for `cost_models.streams`.

Nodes run where they stand: calls one after the other; a collective begins where it is issued, once the links of its
group are free (its stream: "network" where groups span nodes, else "node"); where it is waited for, computation stands
still until it is done; so it does while a call exchanges rows. So whatever passes do to a lowered program is priced by
walking it.

With micro-batches, forward and backward run so often; the update, and what is hoisted, once. Between them the gradients
of each micro-batch but the first are added to a sum, which is read and written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from torch import fx

from autoshard.ir.collectives import is_collective, is_wait
from autoshard.ir.lowered import PhasedProgram
from autoshard.ir.mesh import Mesh
from autoshard.ir.offload import LABEL
from autoshard.kernels.offload import TRANSFERS
from cost_models.compute import accumulation_time
from cost_models.device import Device
from cost_models.hardware import Cluster
from cost_models.streams import Op, Segment
from cost_models.timeline import COMPUTE
from passes.memory.lowered_memory import carried_bytes, carried_nodes
from passes.strategies.collective_nodes import collective_of, communicates, exchanges
from passes.strategies.enumerate_strategies import resolve
from passes.strategies.local_tracer import EMITTED_AT, IS_RESHARD
from passes.strategies.price_nodes import NodePrices

COPIES = "reshard copies"
ACCUMULATION = "accumulation"
NETWORK, NODE = "network", "node"
NO_COUNTS: Mapping[str, int] = MappingProxyType({})
"""Counts of a program that leaves out no blocks."""


@dataclass(frozen=True, slots=True)
class WalkedStep:
    """What a step is, as its lowered program says.

    Args:
        segments: its phases, in the order in which they run.
        sent_bytes: bytes that a rank sends over each mesh axis.
        adding_s: seconds of adding the gradients of one micro-batch to those before it.
    """

    segments: tuple[Segment, ...]
    sent_bytes: Mapping[str, float]
    adding_s: float = 0.0


def walk_program(phased: PhasedProgram, prices: NodePrices, micro_batches: int = 1) -> WalkedStep:
    """The step of a lowered program.

    Args:
        phased: the program, which leaves out no blocks.
        prices: of its nodes.
        micro_batches: how many a step has; the program is that of one.
    """
    written = {name: _PhaseWalk(name, prices).segment(phase.graph) for name, phase in phased.phases.items()}
    first, last = ([written[name]] if name in written else [] for name in ("hoisted", "update"))
    adding_s = seconds_of_adding(phased, prices.cluster.device)
    each = [written["forward"], written["backward"]]
    segments = (*first, *each * micro_batches, *adding_up(adding_s, micro_batches), *last)
    return WalkedStep(segments, sent_by_axis(phased, prices.mesh, micro_batches), adding_s=adding_s)


def sent_by_axis(
    phased: PhasedProgram, mesh: Mesh, micro_batches: int = 1, counts: Mapping[str, int] = NO_COUNTS
) -> dict[str, float]:
    """Bytes that a rank sends over each mesh axis in a step.

    Args:
        phased: the program of one micro-batch.
        mesh: its mesh.
        micro_batches: how many a step has.
        counts: site of the traced program to how many of a whole one it stands for, where that is not 1.
    """
    found = defaultdict[str, float](float)
    for name, phase in phased.phases.items():
        times = micro_batches if name in ("forward", "backward") else 1
        for site, node in _calls_by_site(phased, phase):
            if communicates(node):
                sent = collective_of(node, mesh)
                found[sent.axes[0]] += times * counts.get(site, 1) * sent.sent_bytes
    return dict(found)


def computed_by_site(phased: PhasedProgram, prices: NodePrices) -> dict[str, float]:
    """Seconds of what runs for each site of the traced program, without its reshards and what is sent."""
    found = defaultdict[str, float](float)
    for phase in phased.phases.values():
        for site, node in _calls_by_site(phased, phase):
            if IS_RESHARD not in node.meta:
                found[site] += prices.computed_s(node)
    return dict(found)


def _calls_by_site(phased: PhasedProgram, phase: fx.GraphModule) -> Iterator[tuple[str, fx.Node]]:
    """Calls of a phase, each with the site of the traced program that it was emitted for; "" for none."""
    sites = {node.name: resolve(node)[0].name for node in phased.lowered.traced.graph.nodes if node.op != "output"}
    for node in phase.graph.nodes:
        if node.op == "call_function":
            name = str(node.meta.get(EMITTED_AT, ""))
            yield sites.get(name, name), node


def adding_up(adding_s: float, micro_batches: int) -> list[Segment]:
    """Adding the gradients of all micro-batches to those of the first; nothing with one of them."""
    more = micro_batches - 1
    if not more or not adding_s:
        return []
    return [Segment(ACCUMULATION, (Op("add gradients", ACCUMULATION, more * adding_s, launches=more),))]


def seconds_of_adding(phased: PhasedProgram, device: Device, counts: Mapping[str, int] = NO_COUNTS) -> float:
    """Seconds to add what one backward carries into the update to sums; `counts` is as of `sent_by_axis`."""
    sites = (node.meta.get(EMITTED_AT, "") for node in carried_nodes(phased))
    times = (accumulation_time(size, device) for size in carried_bytes(phased))
    return sum(counts.get(site, 1) * seconds for site, seconds in zip(sites, times, strict=True))


def stream_of(axes: tuple[str, ...], cluster: Cluster, mesh_axes: Mapping[str, int]) -> str:
    """The stream of what is sent over some mesh axes: communicators share their links."""
    return NETWORK if cluster.group_links(mesh_axes, axes).nodes > 1 else NODE


@dataclass(slots=True)
class _PhaseWalk:
    """One phase in the making; `begun` says which operation is the collective that a node began."""

    name: str
    prices: NodePrices
    ops: list[Op] = field(default_factory=list)
    begun: dict[fx.Node, int] = field(default_factory=dict)

    def segment(self, graph: fx.Graph) -> Segment:
        for node in graph.nodes:
            if node.op == "call_function":
                self._write(node)
        return Segment(self.name, tuple(self.ops))

    def _write(self, node: fx.Node) -> None:
        seconds = self.prices.computed_s(node)
        if seconds > 0:
            self.ops.append(Op(node.name, _label(node), seconds))
        if communicates(node):
            self._begin(node)
        if exchanges(node):
            self._wait(node, node)
        elif is_wait(node) and _collective_behind(node) in self.begun:
            self._wait(node, _collective_behind(node))

    def _wait(self, node: fx.Node, behind: fx.Node) -> None:
        self.ops.append(Op(node.name, _label(node), 0.0, needs=(self.begun[behind],), launches=0))

    def _begin(self, node: fx.Node) -> None:
        prices = self.prices
        sent = collective_of(node, prices.mesh)
        axis, stream = sent.axes[0], stream_of(sent.axes, prices.cluster, dict(prices.mesh.axes))
        behind = (len(self.ops) - 1,) if self.ops else ()
        self.begun[node] = len(self.ops)
        self.ops.append(Op(f"{node.name} over {','.join(sent.axes)}", axis, prices.sent_s(node), stream, behind))


def _label(node: fx.Node) -> str:
    """What the time of a node counts as."""
    if IS_RESHARD in node.meta:
        return COPIES
    return LABEL if node.target in TRANSFERS else node.meta.get("phase", COMPUTE)


def _collective_behind(wait: fx.Node) -> fx.Node:
    """The collective that a node waits for."""
    node = wait.all_input_nodes[0]
    while not is_collective(node):
        node = node.all_input_nodes[0]
    return node
