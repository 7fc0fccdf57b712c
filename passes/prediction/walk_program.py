"""Read the step of one rank off its lowered program, as segments for `cost_models.streams`.

Nodes run where they stand: calls one after the other; a collective begins where it is issued, once the links of its
group are free (its stream: "network" where groups span nodes, else "node"); where it is waited for, computation stands
still until it is done; so it does while a call exchanges rows. So whatever passes do to a lowered program is priced by
walking it.

* With micro-batches, forward and backward run so often; the update, and what is hoisted, once. Between them the
  gradients of each micro-batch but the first are added to a sum, which is read and written.
* Of a program that leaves out blocks (`passes.strategies.elided`), the calls from the first to the last of the block
  that stands for them run again and again. What is sent for a later block in one round is waited for in the next.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from autoshard.ir.collectives import is_collective, is_wait
from autoshard.ir.lowered import PhasedProgram
from autoshard.ir.offload import LABEL
from autoshard.kernels.offload import TRANSFERS
from cost_models.compute import accumulation_time
from cost_models.device import Device
from cost_models.hardware import Cluster
from cost_models.streams import Op, Segment
from cost_models.timeline import COMPUTE
from passes.memory.lowered_memory import carried_bytes, carried_nodes
from passes.strategies.collective_nodes import collective_of, communicates, exchanges
from passes.strategies.elided import NOTHING_ELIDED, Elided
from passes.strategies.enumerate_strategies import resolve
from passes.strategies.local_tracer import EMITTED_AT, IS_RESHARD
from passes.strategies.price_nodes import NodePrices

COPIES = "reshard copies"
ACCUMULATION = "accumulation"
NETWORK, NODE = "network", "node"


@dataclass(frozen=True, slots=True)
class WalkedStep:
    """What a step is, as its lowered program says.

    Args:
        segments: its phases, in the order in which they run.
        sent_bytes: bytes that a rank sends over each mesh axis.
        passes_bytes: what passes over the lowered program add to its peak (negative: take from it).
        adding_s: seconds of adding the gradients of one micro-batch to those before it.
    """

    segments: tuple[Segment, ...]
    sent_bytes: Mapping[str, float]
    passes_bytes: int = 0
    adding_s: float = 0.0


def walk_program(
    phased: PhasedProgram, prices: NodePrices, elided: Elided = NOTHING_ELIDED, micro_batches: int = 1
) -> WalkedStep:
    """The step of a lowered program.

    Args:
        phased: the program.
        prices: of its nodes.
        elided: what the program leaves out.
        micro_batches: how many a step has; the program is that of one.
    """
    traced = phased.lowered.traced.graph
    written = {name: _Phase(name, phase.graph, prices, elided, traced) for name, phase in phased.phases.items()}
    first, last = ([written[name]] if name in written else [] for name in ("hoisted", "update"))
    sent = defaultdict[str, float](float)
    segments = []
    adding_s = _adding_s(phased, elided, prices.cluster.device)
    for times, phases in ((1, first), (micro_batches, [written["forward"], written["backward"]]), (1, last)):
        if phases is last:
            segments += adding_up(adding_s, micro_batches)
        segments += [phase.segment() for phase in phases] * times
        for phase in phases:
            for axis, size in phase.sent_bytes.items():
                sent[axis] += times * size
    return WalkedStep(tuple(segments), dict(sent), adding_s=adding_s)


def computed_by_site(phased: PhasedProgram, prices: NodePrices) -> dict[str, float]:
    """Seconds of what runs for each site of the traced program, without its reshards and what is sent."""
    sites = {node.name: resolve(node)[0].name for node in phased.lowered.traced.graph.nodes if node.op != "output"}
    found = defaultdict[str, float](float)
    for phase in phased.phases.values():
        for node in phase.graph.nodes:
            if node.op == "call_function" and IS_RESHARD not in node.meta:
                name = str(node.meta.get(EMITTED_AT, ""))
                found[sites.get(name, name)] += prices.computed_s(node)
    return dict(found)


def adding_up(adding_s: float, micro_batches: int) -> list[Segment]:
    """Adding the gradients of all micro-batches to those of the first; nothing with one of them."""
    more = micro_batches - 1
    if not more or not adding_s:
        return []
    return [Segment(ACCUMULATION, (Op("add gradients", ACCUMULATION, more * adding_s, launches=more),))]


def _adding_s(phased: PhasedProgram, elided: Elided, device: Device) -> float:
    """Seconds to add what one backward carries into the update to sums, of blocks that are left out included."""
    counts = elided.site_counts()
    sites = (node.meta.get(EMITTED_AT, "") for node in carried_nodes(phased))
    times = (accumulation_time(size, device) for size in carried_bytes(phased))
    return sum(counts.get(site, 1) * seconds for site, seconds in zip(sites, times, strict=True))


def stream_of(axes: tuple[str, ...], cluster: Cluster, mesh_axes: Mapping[str, int]) -> str:
    """The stream of what is sent over some mesh axes: communicators share their links."""
    return NETWORK if cluster.group_links(mesh_axes, axes).nodes > 1 else NODE


@dataclass(slots=True)
class _Phase:
    """One phase in the making; `begun` says which operation is the collective that a node began last."""

    name: str
    graph: fx.Graph
    prices: NodePrices
    elided: Elided
    traced: fx.Graph
    ops: list[Op] = field(default_factory=list)
    begun: dict[fx.Node, int] = field(default_factory=dict)
    sent_bytes: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def segment(self) -> Segment:
        nodes = [node for node in self.graph.nodes if node.op == "call_function"]
        end = 0
        for first, last, more in sorted(_windows(nodes, self.elided, self.traced)):
            self._write(nodes[end:last])
            self._repeat(nodes[first:last], more)
            end = last
        self._write(nodes[end:])
        return Segment(self.name, tuple(self.ops))

    def _repeat(self, window: Sequence[fx.Node], more: int) -> None:
        """Write the nodes of a window again; what it waits for from before is then what it sent in the last round."""
        inside = {node for node in window if is_collective(node)}
        waited = [_collective_behind(node) for node in window if is_wait(node)]
        coming = [node for node in waited if node not in inside]
        going = list(inside.difference(waited))
        going.sort(key=window.index)
        for _ in range(more):
            self.begun |= {old: self.begun[new] for old, new in zip(coming, going, strict=False)}
            self._write(window)

    def _write(self, nodes: Sequence[fx.Node]) -> None:
        for node in nodes:
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
        self.sent_bytes[axis] += sent.sent_bytes
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


def _windows(nodes: Sequence[fx.Node], elided: Elided, traced: fx.Graph) -> Iterator[tuple[int, int, int]]:
    """Of each run of calls that stands for others: its first node, the one behind its last, and how often it runs more.

    It is bounded by calls, which passes leave in their order, and by what is sent or waited for right behind them.
    """
    for sites, more in elided.runs:
        members = {
            *sites,
            *(node.name for node in traced.nodes if node.op != "output" and resolve(node)[0].name in sites),
        }
        inside = [node.meta.get(EMITTED_AT) in members for node in nodes]
        calls = [place for place, node in enumerate(nodes) if inside[place] and not _sends(node)]
        if not calls:
            continue
        end = calls[-1] + 1
        while end < len(nodes) and inside[end]:
            end += 1
        yield calls[0], end, more


def _sends(node: fx.Node) -> bool:
    return is_collective(node) or is_wait(node)
