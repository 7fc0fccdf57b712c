"""A clock that counts matrix products, and so measures hidden communication exactly under any load.

`WorkClock` advances with the products of a process and with its waits. `walk` computes the waits of a lowered program
under the same clock. `hideable_s` computes the time that any order of the program's phases could hide.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard.ir.collectives import is_collective, is_wait
from autoshard.ir.communicators import group_axes
from autoshard.ir.lowered import PhasedProgram
from passes.strategies.collective_nodes import collective_of

_aten = torch.ops.aten
_PRODUCTS = {
    _aten.mm.default: 0, _aten.mm.out: 0, _aten.addmm.default: 1, _aten.bmm.default: 0, _aten.baddbmm.default: 1,
}  # fmt: skip
"""For each operator that is a matrix product, the index of its first factor among the operands."""


def flops(operator: Any, args: Sequence[Any]) -> float:
    """Return the floating-point operations of a matrix product, and 0 for any other operator."""
    if operator not in _PRODUCTS:
        return 0.0
    left, right = args[_PRODUCTS[operator] : _PRODUCTS[operator] + 2]
    return 2.0 * left.numel() * right.shape[-1]


class WorkClock(TorchDispatchMode):
    """A clock for `autoshard.testing.delayed_mesh`, which matrix products and waits advance.

    The clock is a dispatch mode: it counts the products that run in its `with` block.
    """

    def __init__(self, flops_per_s: float) -> None:
        super().__init__()
        self._flops_per_s = flops_per_s
        self._now_s = 0.0

    def now_s(self) -> float:
        """Return the seconds of work and waits so far."""
        return self._now_s

    def sleep(self, seconds: float) -> None:
        """Advance the clock by the seconds of a wait."""
        self._now_s += seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._now_s += flops(func, args) / self._flops_per_s
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, slots=True)
class Sent:
    """A collective of a program: its bytes, its duration on a free link, and the wait for its result."""

    name: str
    sent_bytes: int
    duration_s: float
    waited_s: float


@dataclass(frozen=True, slots=True)
class Rig:
    """Equal links without latency, and processes that spend time on matrix products alone."""

    flops_per_s: float
    bandwidth_bytes_per_s: float

    def computed_s(self, node: fx.Node) -> float:
        """Return the seconds that a node computes."""
        args = fx.map_arg(node.args, lambda operand: operand.meta.get("val"))
        return flops(node.target, args) / self.flops_per_s

    def sent_s(self, node: fx.Node, phased: PhasedProgram) -> float:
        """Return the seconds of a collective on a free link."""
        return collective_of(node, phased.lowered.mesh).sent_bytes / self.bandwidth_bytes_per_s


@dataclass(slots=True)
class _Walk:
    rig: Rig
    now_s: float = 0.0
    free_at_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    done_at_s: dict[fx.Node, float] = field(default_factory=dict)
    sent: list[Sent] = field(default_factory=list)

    def run(self, phased: PhasedProgram) -> list[Sent]:
        for graph_module in phased.phases.values():
            for node in graph_module.graph.nodes:
                if is_collective(node):
                    self._begin(node, phased)
                elif is_wait(node):
                    self._wait(node.all_input_nodes[0], phased)
                else:
                    self.now_s += self.rig.computed_s(node) if node.op == "call_function" else 0.0
        return self.sent

    def _begin(self, node: fx.Node, phased: PhasedProgram) -> None:
        axes = group_axes(str(node.args[-1]))
        end_s = max([self.now_s, *(self.free_at_s[axis] for axis in axes)]) + self.rig.sent_s(node, phased)
        self.free_at_s.update(dict.fromkeys(axes, end_s))
        self.done_at_s[node] = end_s

    def _wait(self, start: fx.Node, phased: PhasedProgram) -> None:
        waited_s = max(0.0, self.done_at_s[start] - self.now_s)
        self.now_s += waited_s
        size = int(collective_of(start, phased.lowered.mesh).sent_bytes)
        self.sent.append(Sent(start.name, size, self.rig.sent_s(start, phased), waited_s))


def walk(phased: PhasedProgram, rig: Rig) -> list[Sent]:
    """Return the transfers of a program in the order of their waits."""
    return _Walk(rig).run(phased)


def hideable_s(plain: PhasedProgram, rig: Rig) -> float:
    """Return the seconds of communication that products of the same phase could hide in any order.

    Products hide a collective if they neither need its result nor feed its input. A phase hides at most the duration of
    its products.
    """
    return sum(_hideable_s(graph_module.graph, plain, rig) for graph_module in plain.phases.values())


def _hideable_s(graph: fx.Graph, plain: PhasedProgram, rig: Rig) -> float:
    nodes = list(graph.nodes)
    costs = [rig.computed_s(node) if node.op == "call_function" else 0.0 for node in nodes]
    places = {node: place for place, node in enumerate(nodes)}
    before = {
        place: _reached(place, [[places[item] for item in node.all_input_nodes] for node in nodes])
        for place in (places[node] for node in nodes if is_collective(node))
    }
    behind = {place: _reached(place, [[places[item] for item in node.users] for node in nodes]) for place in before}
    found_s = 0.0
    for place in before:
        free_s = sum(costs) - sum(costs[item] for item in before[place] | behind[place])
        found_s += min(rig.sent_s(nodes[place], plain), free_s)
    return min(found_s, sum(costs))


def _reached(place: int, edges: Sequence[Sequence[int]]) -> set[int]:
    found, stack = {place}, [place]
    while stack:
        new = [item for item in edges[stack.pop()] if item not in found]
        found.update(new)
        stack += new
    return found


def products_s(phased: PhasedProgram, rig: Rig) -> float:
    """Return the seconds of all matrix products of a step."""
    nodes = (node for phase in phased.phases.values() for node in phase.graph.nodes if node.op == "call_function")
    return sum(map(rig.computed_s, nodes))


def share_hidden(plain: PhasedProgram, sent: Sequence[Any], rig: Rig) -> float:
    """Return the hidden seconds of communication, divided by the hideable seconds of the program `plain`.

    `sent` has the transfers of a program or of processes. If nothing is hideable, the result is 1.
    """
    could_s = hideable_s(plain, rig)
    total_s = sum(item.duration_s for item in walk(plain, rig))
    exposed_s = sum(item.waited_s for item in sent)
    return (total_s - exposed_s) / could_s if could_s else 1.0
