"""Chooses groups of calls, each of which one generated kernel computes, so that the program saves most time.

1. Each call that a kernel can compute is a group of its own.
2. Two groups may be merged if one makes a value that the other reads, or if both read one value.
3. The two groups whose union saves most time are merged, again and again, until no union saves time.

The time of a group is the time of a launch and of moving its operands and results (`cost_models.compute`). If the
device is unknown, bytes are compared in place of time. Ties are decided by the order of the program, so all ranks
choose the same groups.

A union is legal if

1. one kernel can compute it (`autoshard.kernels.generated`): its loops agree, its dtypes are known, its tiles fit in
   registers;
2. all readers of its results come after all makers of its operands. For this, each call moves as early as its operands
   allow. Calls that no kernel computes (collectives, random numbers, matrix products) keep their order;
3. the program overwrites nothing, and the operands are on one device.

Views and constants cost nothing, and are part of every group that reads them.
"""

from __future__ import annotations

import heapq
import operator
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from autoshard.kernels.generated.define import NamedGroup
from autoshard.kernels.generated.group import Group, GroupStep, Ref, ValueShape
from autoshard.kernels.generated.loops import NoLoopsError
from autoshard.kernels.generated.operators import IndexKind, kind_of
from autoshard.kernels.generated.source import write_source
from cost_models.compute import memory_time
from cost_models.device import Device
from passes.lowering.count_launches import Traffic, traffic_of
from passes.strategies.tensor_infos import bytes_in

_NEAREST = 8
"""For each operand and result of a group, the groups of at most this many nearest readers are tried as partners."""

_WIDTH = 110
"""The most characters in a line of a generated kernel's docstring."""


@dataclass(frozen=True, slots=True)
class ChosenGroup:
    """Calls of a program that one kernel computes.

    Args:
        members: the calls, without views and constants, in order.
        results: members that calls outside of the group read, in order.
        group: the computation of the kernel, without names.
        names: names of the nodes in the program: first of the operands of `group`, then of its steps.
        saved_bytes: bytes of memory traffic that the kernel saves.
    """

    members: tuple[fx.Node, ...]
    operands: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]
    group: Group
    names: tuple[str, ...]
    saved_bytes: int = 0
    saved_launches: int = 0

    @property
    def traffic(self) -> Traffic:
        """The launch and the bytes of one run of the group."""
        return Traffic(1, sum(bytes_in(_value(node)) for node in (*self.operands, *self.results)))

    def compared(self) -> ChosenGroup:
        """Return the group with the launches and bytes that its kernel saves.

        The savings are the traffic of the members as single calls, less the traffic of the kernel.
        """
        before = sum(map(traffic_of, self.members), Traffic())
        after = self.traffic
        return replace(
            self,
            saved_bytes=before.memory_bytes - after.memory_bytes,
            saved_launches=before.launches - after.launches,
        )

    def named(self, alike: int = 1) -> NamedGroup:
        """Return the group with the names and the docstring of its generated source.

        `alike` is the number of equal groups in the program, which the docstring states.
        """
        nodes = textwrap.fill(", ".join(node.name for node in self.members) + ".", _WIDTH)
        source = next((node.meta["source"] for node in self.members if node.meta.get("source")), "an unknown line")
        others = f" The program has {alike} such groups." if alike > 1 else ""
        launches = f"{self.saved_launches} launch{'es' if self.saved_launches > 1 else ''}"
        saved = f"Saves {launches} and {self.saved_bytes} bytes read or written.{others}"
        return NamedGroup(self.group, self.names, f"{nodes}\n\n{textwrap.fill(f'From {source}. {saved}', _WIDTH)}")


def choose_groups(graph: fx.Graph, device: Device | None) -> tuple[ChosenGroup, ...]:
    """Choose the groups of a graph for generated kernels, in the order of their first members.

    A group is returned only if it saves a launch. The result is empty for a graph that writes in place.

    Args:
        device: the device, by whose times groups are compared. None: bytes of memory traffic are compared.
    """
    if any(_writes(node) for node in graph.nodes):
        return ()
    return _UnitedGroups(graph, device).run()


def is_view(node: fx.Node) -> bool:
    """Whether a node only reindexes the elements of its one operand. A `contiguous` call that copies is no view."""
    if len(node.all_input_nodes) != 1:
        return False
    if node.target is torch.ops.aten.contiguous.default:
        return node.all_input_nodes[0].meta["val"].is_contiguous()
    return kind_of(node.target) is IndexKind.VIEW


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _is_free(node: fx.Node) -> bool:
    """Whether a node is a view, a `getitem` or a constant. It may stand anywhere behind its operands."""
    is_constant = kind_of(node.target) is IndexKind.CONSTANT and not node.all_input_nodes
    return node.op == "get_attr" or node.target is operator.getitem or is_view(node) or is_constant


def _is_member(node: fx.Node) -> bool:
    """Whether a call may be a member of a group: a pointwise call or a reduction of tensors on one device."""
    if (
        kind_of(node.target) not in (IndexKind.POINTWISE, IndexKind.REDUCTION)
        or is_view(node)
        or not node.all_input_nodes
    ):
        return False
    values = [_value(item) for item in (node, *node.all_input_nodes)]
    devices = {value.device for value in values if isinstance(value, Tensor) and value.dim()}
    options = {"device", "layout", "pin_memory"} & {name for name, item in node.kwargs.items() if item is not None}
    return all(isinstance(value, Tensor) for value in values) and len(devices) <= 1 and not options


@dataclass(slots=True)
class _UnitedGroups:
    """The groups of a graph, which are merged step by step.

    Args:
        places: index of each node in the order in which every call comes as early as its operands allow.
        readers: the calls that read each value, directly or through views, by node.
        groups: the present groups, by number.
        owners: the number of the group that a call belongs to, by node.
    """

    graph: fx.Graph
    device: Device | None
    places: dict[fx.Node, int] = field(init=False)
    readers: Mapping[fx.Node, Sequence[fx.Node]] = field(init=False)
    groups: dict[int, ChosenGroup] = field(default_factory=dict)
    owners: dict[fx.Node, int] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self.places = _places(self.graph)
        self.readers = _readers(self.graph, self.places)

    def run(self) -> tuple[ChosenGroup, ...]:
        for node in sorted(filter(_is_member, self.graph.nodes), key=self.places.__getitem__):
            alone = self._build([node])
            if alone is not None:
                self._add(alone)
        self._unite_all()
        found = [chosen for chosen in self.groups.values() if len(chosen.members) > 1 and chosen.saved_launches > 0]
        return tuple(sorted(found, key=lambda chosen: self.places[chosen.members[0]]))

    def _add(self, chosen: ChosenGroup) -> int:
        number = next(self.numbers)
        self.groups[number] = chosen
        self.owners.update(dict.fromkeys(chosen.members, number))
        return number

    def _unite_all(self) -> None:
        waiting: list[Any] = []  # (-saved, places of the first members, numbers of the groups)
        unions: dict[tuple[int, int], ChosenGroup] = {}

        def consider(first: int, second: int) -> None:
            pair = (min(first, second), max(first, second))
            union = None if pair in unions else self._union(*pair)
            if union is None:
                return
            saved = sum(self._time(self.groups[number]) for number in pair) - self._time(union)
            if saved > 0:
                unions[pair] = union
                places = sorted(self.places[self.groups[number].members[0]] for number in pair)
                heapq.heappush(waiting, (-saved, *places, *pair))

        for number in list(self.groups):
            for other in self._neighbours(number):
                if other > number:
                    consider(number, other)
        while waiting:
            *_, first, second = heapq.heappop(waiting)
            union = unions.pop((first, second))
            if first in self.groups and second in self.groups:
                del self.groups[first], self.groups[second]
                number = self._add(union)
                for other in self._neighbours(number):
                    consider(number, other)

    def _neighbours(self, number: int) -> list[int]:
        """Return the numbers of the groups to try to merge with group `number`.

        They make an operand of the group, or read its operands or results. If a value has many readers, only the
        nearest readers count.
        """
        chosen = self.groups[number]
        found: dict[int, None] = {}
        for value in (*chosen.operands, *chosen.results):
            users = [user for user in self.readers[value] if self.owners.get(user, number) != number]
            users.sort(key=lambda user: abs(self.places[user] - self.places[chosen.members[0]]))
            found |= dict.fromkeys(self.owners[user] for user in users[:_NEAREST])
            if value in self.owners:
                found[self.owners[value]] = None
        found.pop(number, None)
        return list(found)

    def _union(self, first: int, second: int) -> ChosenGroup | None:
        members = [*self.groups[first].members, *self.groups[second].members]
        last = max(map(self.places.__getitem__, members))
        within = set(members)
        if any(self.places[user] < last for node in members for user in self.readers[node] if user not in within):
            return None
        return self._build(sorted(members, key=self.places.__getitem__))

    def _build(self, members: Sequence[fx.Node]) -> ChosenGroup | None:
        """Return the group of the calls `members`, with its savings, or None if no kernel can compute it."""
        within = set(members)
        results = [node for node in members if any(user not in within for user in self.readers[node])]
        chosen = _GroupBuilder(within).build(members, results)
        if chosen is None or not results:
            return None
        try:
            write_source(chosen.group, chosen.names, "")
        except NoLoopsError:
            return None
        return chosen.compared()

    def _time(self, chosen: ChosenGroup) -> float:
        """Return the seconds of a group's kernel, or the bytes of its memory traffic if the device is unknown."""
        traffic = chosen.traffic
        if self.device is None:
            return traffic.memory_bytes
        return traffic.launches * self.device.launch_latency_s + memory_time(traffic.memory_bytes, self.device)


@dataclass(slots=True)
class _GroupBuilder:
    """Builds the group of the calls `within`.

    Args:
        operands: index of each operand of the group, by node.
        steps: the calls, views and constants of the group, in order.
    """

    within: set[fx.Node]
    operands: dict[fx.Node, int] = field(default_factory=dict)
    steps: list[fx.Node] = field(default_factory=list)

    def build(self, members: Sequence[fx.Node], results: Sequence[fx.Node]) -> ChosenGroup | None:
        for node in members:
            self._visit(node)
        if not self.operands:
            return None
        nodes = [*self.operands, *self.steps]
        numbers = {node: number for number, node in enumerate(nodes)}
        group = Group(
            operands=tuple(ValueShape.of(_value(node)) for node in self.operands),
            steps=tuple(_step(node, numbers) for node in self.steps),
            results=tuple(numbers[node] for node in results),
        )
        return ChosenGroup(
            tuple(members), tuple(self.operands), tuple(results), group, tuple(node.name for node in nodes)
        )

    def _visit(self, node: fx.Node) -> None:
        if node in self.operands or node in self.steps:
            return
        is_constant = kind_of(node.target) is IndexKind.CONSTANT and not node.all_input_nodes
        if node not in self.within and not is_view(node) and not is_constant:
            self.operands[node] = len(self.operands)
            return
        for operand in node.all_input_nodes:
            self._visit(operand)
        self.steps.append(node)


def _step(node: fx.Node, numbers: Mapping[fx.Node, int]) -> GroupStep:
    def argument(item: Any) -> Any:
        if isinstance(item, fx.Node):
            return Ref(numbers[item])
        return tuple(map(argument, item)) if isinstance(item, (list, tuple)) else item

    target: Any = node.target
    kwargs = tuple((name, argument(item)) for name, item in sorted(node.kwargs.items()))
    return GroupStep(target, argument(node.args), kwargs, ValueShape.of(_value(node)))


def _places(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return each node's index in a new order of the graph.

    Calls that kernels can compute come as early as their operands allow. All other calls keep their order.
    """
    levels: dict[fx.Node, int] = {}
    calls = 0
    for node in graph.nodes:
        if node.op != "placeholder" and not _is_free(node) and not _is_member(node):
            calls += 1
            levels[node] = calls
        else:
            levels[node] = max((levels[operand] for operand in node.all_input_nodes), default=0)
    ordered = sorted(graph.nodes, key=levels.__getitem__)  # stable: among equals the graph's own order
    return {node: place for place, node in enumerate(ordered)}


def _readers(graph: fx.Graph, places: Mapping[fx.Node, int]) -> dict[fx.Node, list[fx.Node]]:
    """Return the calls that read each node, directly or through views, in the order of `places`."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        direct: dict[fx.Node, None] = {}
        for user in node.users:
            direct |= dict.fromkeys(found[user] if is_view(user) else [user])
        found[node] = sorted(direct, key=places.__getitem__)
    return found


def _value(node: fx.Node) -> Any:
    return node.meta.get("val")
