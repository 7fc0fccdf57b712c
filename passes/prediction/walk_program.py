"""Read the step of one rank off its lowered program, as segments for the simulation in `cost_models.streams`.

Nodes run in the order of the graph, and calls run one after the other. A collective starts at its node, once the links
of its group are free. Its stream is "network" if groups span nodes, else "node". At the node that waits for the
collective, computation pauses until the collective is done. Computation also pauses while a call exchanges rows between
ranks (`autoshard.kernels.exchange`). So any pass over lowered programs is priced by a walk through its result.

Forward and backward run once for each micro-batch. The hoisted phase and the update run once. Before the update, the
gradients of each micro-batch but the first are added to sums, which are read and written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import fx

from autoshard.ir.collectives import is_collective, is_wait
from autoshard.ir.lowered import PhasedProgram
from autoshard.ir.mesh import Mesh
from autoshard.ir.offload import LABEL
from autoshard.ir.recompute import PHASE
from autoshard.kernels.offload import TRANSFERS
from cost_models.compute import accumulation_time
from cost_models.device import Device
from cost_models.hardware import Cluster
from cost_models.streams import Op, Segment
from cost_models.timeline import COMPUTE
from passes.memory.lowered_memory import carried_bytes, carried_nodes
from passes.prediction.unfold_units import unfolded
from passes.strategies.collective_nodes import collective_of, communicates, exchanges, size_in_whole_program
from passes.strategies.local_tracer import EMITTED_AT, IS_RESHARD, KERNEL, PART_LEFT
from passes.strategies.local_units import LocalUnits, UnitSpot
from passes.strategies.price_nodes import NodePrices

COPIES = "reshard copies"
ACCUMULATION = "accumulation"

ADDING_UP = "add gradients"
"""The name of the operations that add gradients of micro-batches to sums."""
NETWORK, NODE = "network", "node"


@dataclass(frozen=True, slots=True)
class WalkedStep:
    """A step, read off its lowered program.

    Args:
        segments: the phases in the order in which they run; forward and backward occur once for each micro-batch.
        sent_bytes: the bytes that a rank sends in a step, by mesh axis.
        adding_s: seconds to add the gradients of one micro-batch to their sums.
    """

    segments: tuple[Segment, ...]
    sent_bytes: Mapping[str, float]
    adding_s: float = 0.0


def walk_program(phased: PhasedProgram, prices: NodePrices, micro_batches: int = 1) -> WalkedStep:
    """Return the step of a lowered program.

    Args:
        phased: the program of one micro-batch. Units that it leaves out run like the unit that stands for them.
        micro_batches: number of micro-batches in a step.
    """
    units = LocalUnits.of(phased.lowered)
    written = {name: _PhaseWalk(name, prices, units).segment(phase.graph) for name, phase in phased.phases.items()}
    first, last = ([written[name]] if name in written else [] for name in ("hoisted", "update"))
    adding_s = _seconds_of_adding(phased, prices.cluster.device, units)
    each = [written["forward"], written["backward"]]
    segments = (*first, *each * micro_batches, *adding_up(adding_s, micro_batches), *last)
    return WalkedStep(segments, _sent_by_axis(phased, prices.mesh, units, micro_batches), adding_s=adding_s)


def _sent_by_axis(phased: PhasedProgram, mesh: Mesh, units: LocalUnits, micro_batches: int) -> dict[str, float]:
    found = defaultdict[str, float](float)
    for name, phase in phased.phases.items():
        times = micro_batches if name in ("forward", "backward") else 1
        for node in filter(communicates, phase.graph.nodes):
            sent = collective_of(node, mesh)
            count = units.count(node)
            found[sent.axes[0]] += times * (count if count > 1 else size_in_whole_program(node, 1.0)) * sent.sent_bytes
    return dict(found)


def adding_up(adding_s: float, micro_batches: int) -> list[Segment]:
    """Return the segment that adds the gradients of all micro-batches but the first to sums, in a list.

    Each micro-batch takes `adding_s` seconds. With one micro-batch, or without gradients, the list is empty.
    """
    more = micro_batches - 1
    if not more or not adding_s:
        return []
    return [Segment(ACCUMULATION, (Op(ADDING_UP, ACCUMULATION, more * adding_s, launches=more),))]


def _seconds_of_adding(phased: PhasedProgram, device: Device, units: LocalUnits) -> float:
    sizes = zip(carried_nodes(phased), carried_bytes(phased), strict=True)
    return sum(units.count(node) * accumulation_time(size, device) for node, size in sizes)


def stream_of(axes: tuple[str, ...], cluster: Cluster, mesh_axes: Mapping[str, int]) -> str:
    """Return the stream of collectives over these mesh axes, "network" or "node".

    Collectives on one stream share its links, so they run one after the other.
    """
    return NETWORK if cluster.group_links(mesh_axes, axes).nodes > 1 else NODE


class _Walked(NamedTuple):
    """One event of a node: a computation, the start of a collective or exchange of rows, or a wait.

    Args:
        spot: the unit of repeated blocks that the node belongs to; None outside of all units.
        seconds: time of a computation.
        begins: whether the event is the start of a collective or exchange.
        awaited: the collective or exchange that a wait waits for.
        is_anchor: whether passes leave the event in its unit (`passes.prediction.unfold_units`).
    """

    node: fx.Node
    spot: UnitSpot | None
    seconds: float = 0.0
    begins: bool = False
    awaited: fx.Node | None = None
    is_anchor: bool = False


@dataclass(slots=True)
class _PhaseWalk:
    """One phase whose segment is being built.

    `begun` has for each collective the copies that have started: number of the copy → index of its start in `ops`.
    """

    name: str
    prices: NodePrices
    units: LocalUnits
    ops: list[Op] = field(default_factory=list)
    begun: dict[fx.Node, dict[int, int]] = field(default_factory=dict)

    def segment(self, graph: fx.Graph) -> Segment:
        events = [event for node in graph.nodes if node.op == "call_function" for event in self._events(node)]
        for event, copy in unfolded(events, [repeat.left_out for repeat in self.units.repeats]):
            if event.begins:
                self._begin(event.node, copy)
            elif event.awaited is not None:
                self._wait(event.node, event.awaited, copy)
            else:
                seconds = event.seconds if copy else self._whole_s(event.node, event.seconds)
                kernel = event.node.meta.get(KERNEL)
                launches = kernel.launches if kernel else 1
                self.ops.append(Op(event.node.name, _label(event.node), seconds, launches=launches))
        return Segment(self.name, tuple(self.ops))

    def _events(self, node: fx.Node) -> Iterator[_Walked]:
        kernel, spot = node.meta.get(KERNEL), self.units.spot(node)
        seconds = node.meta.get(PART_LEFT, 1.0) * self.prices.computed_s(node) + (kernel.time_s if kernel else 0.0)
        if seconds > 0:
            yield _Walked(node, spot, seconds, is_anchor=_is_call(node))
        if communicates(node):
            yield _Walked(node, spot, begins=True)
        if exchanges(node):
            yield _Walked(node, spot, awaited=node)
        elif is_wait(node):
            yield _Walked(node, spot, awaited=_collective_behind(node))

    def _whole_s(self, node: fx.Node, seconds: float) -> float:
        """Return the seconds that a call takes in the whole model. Its time in this program is `seconds`.

        If the call packs or unpacks a bucket, the bucket of the whole model also has values of the left-out units.
        """
        latency_s = min(seconds, self.prices.cluster.device.launch_latency_s)
        return latency_s + size_in_whole_program(node, seconds - latency_s)

    def _wait(self, node: fx.Node, behind: fx.Node, copy: int) -> None:
        begun = self.begun.get(behind)
        if begun and self._is_waited_for(behind, copy):
            last = next(reversed(begun.values()))
            self.ops.append(Op(node.name, _label(node), 0.0, needs=(begun.get(copy, last),), launches=0))

    def _is_waited_for(self, behind: fx.Node, copy: int) -> bool:
        """Whether the whole model waits for copy number `copy` of the collective `behind`.

        If a bucket has the collectives of several units, there is one wait for all of them.
        """
        share = 1 / size_in_whole_program(behind, 1.0)
        is_last = copy == self.units.count(behind)
        return copy == 0 or is_last or int(copy * share) > int((copy - 1) * share)

    def _begin(self, node: fx.Node, copy: int) -> None:
        prices = self.prices
        sent = collective_of(node, prices.mesh)
        axis, stream = sent.axes[0], stream_of(sent.axes, prices.cluster, dict(prices.mesh.axes))
        behind = (len(self.ops) - 1,) if self.ops else ()
        self.begun.setdefault(node, {})[copy] = len(self.ops)
        seconds = prices.sent_s(node) / (size_in_whole_program(node, 1.0) if copy else 1.0)
        self.ops.append(Op(f"{node.name} over {','.join(sent.axes)}", axis, seconds, stream, behind))


def _is_call(node: fx.Node) -> bool:
    """Whether a node computes a call of the traced program. Reshards and recomputed nodes do not count."""
    return EMITTED_AT in node.meta and IS_RESHARD not in node.meta and node.meta.get("phase") != PHASE


def _label(node: fx.Node) -> str:
    """Return the part of the step to which a node's time belongs: copies of reshards, offload, or the node's phase."""
    if IS_RESHARD in node.meta and KERNEL not in node.meta:
        return COPIES
    return LABEL if node.target in TRANSFERS else node.meta.get("phase", COMPUTE)


def _collective_behind(wait: fx.Node) -> fx.Node:
    node = wait.all_input_nodes[0]
    while not is_collective(node):
        node = node.all_input_nodes[0]
    return node
