"""Computes values that depend on parameters alone once per step instead of once per micro-batch, if memory allows.

Before: each micro-batch runs `forward(p, x): w = all_gather(p); ...`. After: `hoisted(p): w = all_gather(p)` runs once
before the first micro-batch, and each micro-batch runs `forward(p, x, w)`. The hoisted values are, for example,
gathered weights of ZeRO-3 (in the forward and again in the backward), casts of weights, and transposed copies.

1. Find the shared values, which depend only on parameters and on buffers that the step does not write. Equal values of
   the forward and the backward are one value.
2. A shared value can be hoisted if it has memory of its own and a reader that is not shared. Views are not hoisted,
   because they cost nothing.
3. Hoist the values that save the most time per byte first, as many as memory allows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter, getitem
from typing import Any

import torch
from torch import Tensor, fx

from autoshard.graphs.aliases import aliased_operands
from autoshard.graphs.copy_nodes import copy_node
from autoshard.graphs.extract_graph import needed, placeholder_like
from autoshard.graphs.lazy_module import lazy_module
from autoshard.ir.lowered import PhasedProgram
from autoshard.ir.program import InputKind, OutputKind
from autoshard.kernels.offload import TRANSFERS
from passes.memory.lowered_memory import peak_bytes
from passes.memory.stage_load import ONE_STAGE, StageLoad
from passes.preparation.number_values import Numbering, draws_numbers

Seconds = Callable[[fx.Node], float]

_WAIT = torch.ops._c10d_functional.wait_tensor.default
_MAY_COPY = (torch.ops.aten.contiguous.default, torch.ops.aten.reshape.default)


@dataclass(frozen=True, slots=True)
class Hoist:
    """Hoists values that depend on parameters alone out of the micro-batches.

    Args:
        micro_batches: number of micro-batches in a step. With one, nothing is hoisted.
        seconds: function from a node to its time (`NodeTime`). The times decide the values to hoist first.
        memory_bytes: limit of each rank's peak memory. None: hoisting may not raise the peak.
        load: stages and micro-batches that the rank holds in memory at once.
    """

    micro_batches: int
    seconds: Seconds
    memory_bytes: float | None = None
    load: StageLoad = ONE_STAGE

    def __call__(self, phased: PhasedProgram) -> PhasedProgram:
        """Return the program with hoisted values.

        A program without an update, or a step of one micro-batch, is returned unchanged.
        """
        if self.micro_batches < 2 or phased.update is None:
            return phased
        shared = _Shared.of(phased)
        order = shared.by_time_saved(self.seconds)
        limit = self._peak(phased) if self.memory_bytes is None else self.memory_bytes
        return self._most_that_fits(shared, order, limit)

    def _most_that_fits(self, shared: _Shared, order: Sequence[int], limit: float) -> PhasedProgram:
        """Return the program that hoists the first values of `order`, as many as keep its peak within `limit` bytes."""
        fitting, count, least, most = shared.phased, len(order), 0, len(order)
        while least < most:
            made = shared.hoist_values(order[:count])
            if self._peak(made) <= limit:
                fitting, least = made, count
            else:
                most = count - 1
            count = (least + most + 1) // 2
        return fitting

    def _peak(self, phased: PhasedProgram) -> int:
        return peak_bytes(phased, self.micro_batches, self.load)


@dataclass(slots=True)
class _Shared:
    """The values of a program that all micro-batches share, because they depend on parameters alone.

    Args:
        phased: the program before hoisting.
        inputs: index in `lowered.inputs` of each shared placeholder of the forward.
        kept: for each placeholder of the backward, the node of the forward whose value is saved for it.
        numbering: value numbers of forward and backward. Nodes with equal values have equal numbers.
        nodes: graph module of each shared node of the forward and the backward, in order.
        hoistable: numbers of the shared values that have memory of their own, and that a node outside of `nodes` reads,
            directly or through a view. The dict is an ordered set.
    """

    phased: PhasedProgram
    inputs: Mapping[fx.Node, int]
    kept: Mapping[fx.Node, fx.Node]
    numbering: Numbering = field(default_factory=Numbering)
    nodes: dict[fx.Node, fx.GraphModule] = field(default_factory=dict)
    hoistable: dict[int, None] = field(default_factory=dict)

    @classmethod
    def of(cls, phased: PhasedProgram) -> _Shared:
        written = {slot.slot.name for slot in phased.lowered.outputs if slot.slot.kind == OutputKind.BUFFER_UPDATE}
        inputs = {}
        for index, node in zip(phased.forward_inputs, _placeholders(phased.forward), strict=True):
            slot = phased.lowered.inputs[index].slot
            if slot.kind == InputKind.PARAMETER or (slot.kind == InputKind.BUFFER and slot.name not in written):
                inputs[node] = index
        saved = _results(phased.forward)[len(phased.forward_outputs) :]
        shared = cls(phased, inputs, dict(zip(_placeholders(phased.backward), saved, strict=False)))
        shared._walk(phased.forward, _results(phased.forward)[: len(phased.forward_outputs)])
        shared.numbering.restart_draws()
        shared._walk(phased.backward, _results(phased.backward))
        return shared

    def _walk(self, graph_module: fx.GraphModule, results: Sequence[fx.Node]) -> None:
        """Give the nodes of a phase value numbers, and record its shared values and the values that can be hoisted.

        `results` are the phase's results. The output counts as a reader that is not shared.
        """
        for node in graph_module.graph.nodes:
            if node in self.kept:
                self.numbering.numbers[node] = self.number(self.kept[node])
                is_shared = self.kept[node] in self.nodes
            elif node.op == "placeholder":
                self.numbering.add(node, ("placeholder", node.name))
                is_shared = node in self.inputs
            elif node.op == "output":
                self._note_read(results)
                return
            else:
                self.numbering.add_node(node, graph_module)
                is_shared = _may_be_shared(node) and all(operand in self.nodes for operand in node.all_input_nodes)
                self._note_read(() if is_shared else node.all_input_nodes)
            if is_shared:
                self.nodes[node] = graph_module

    def number(self, node: fx.Node) -> int:
        return self.numbering.numbers[node]

    def _note_read(self, operands: Iterable[fx.Node]) -> None:
        for operand in operands:
            self.hoistable.update(dict.fromkeys(map(self.number, self._owners(operand))))

    def _owners(self, node: fx.Node) -> Iterator[fx.Node]:
        """Yield the shared values with memory of their own that `node` is, or is a view of.

        Nothing is yielded for views of parameters, because parameters stay in memory anyway.
        """
        node = self.kept.get(node, node)
        if node not in self.nodes:
            return
        if _owns_memory(node):
            yield node
            return
        for operand in aliased_operands(node):
            yield from self._owners(operand)

    def by_time_saved(self, seconds: Seconds) -> list[int]:
        """Return the value numbers of the values that can be hoisted, in descending order of time saved per byte.

        The saved time of a value includes the calls that it is computed from. If several values need a call, its time
        is divided equally between them.
        """
        saved, sizes = defaultdict[int, float](float), dict[int, int]()
        needed_by: dict[fx.Node, set[int]] = defaultdict(set)
        for node in reversed(self.nodes):
            if node.op == "call_function" and _owns_memory(node) and self.number(node) in self.hoistable:
                needed_by[node] = {self.number(node)}
                sizes[self.number(node)] = node.meta["val"].numel() * node.meta["val"].element_size()
            for number in sorted(needed_by[node]) if node.op == "call_function" else ():
                saved[number] += seconds(node) / len(needed_by[node])
            for operand in (*node.all_input_nodes, *([self.kept[node]] if node in self.kept else [])):
                needed_by[operand] |= needed_by[node]
        place = {number: index for index, number in enumerate(self.hoistable)}
        worth = {number: saved[number] / max(1, size) for number, size in sizes.items() if saved[number] > 0}
        return sorted(worth, key=lambda number: (-worth[number], place[number]))

    def hoist_values(self, numbers: Iterable[int]) -> PhasedProgram:
        first: dict[int, fx.Node] = {}
        for node in self.nodes:
            first.setdefault(self.number(node), node)
        held = [first[number] for number in sorted(numbers)]
        hoisted, inputs = self._hoisted(held, first)
        backward, saved = self._backward(held)
        return replace(
            self.phased,
            hoisted=hoisted,
            hoisted_inputs=inputs,
            forward=self._forward(held, list(saved.values())),
            backward=backward,
            saved=tuple(saved),
        )

    def _hoisted(self, held: Sequence[fx.Node], first: Mapping[int, fx.Node]) -> tuple[fx.GraphModule, tuple[int, ...]]:
        """Return the graph that computes the values `held`, and the indices of its inputs in `lowered.inputs`.

        `first` has the first node with each value number, in an order with operands first.
        """
        needed, waiting = set[int](), [self.number(node) for node in held]
        while waiting:
            number = waiting.pop()
            if number not in needed:
                needed.add(number)
                waiting += map(self.number, first[number].all_input_nodes)
        graph, made = fx.Graph(), dict[int, fx.Node]()
        constants, inputs = dict[str, Any](), []
        for number, node in first.items():
            if number in needed:
                made[number] = copy_node(graph, node, lambda operand: made[self.number(operand)])
                if node.op == "placeholder":
                    inputs.append(self.inputs[node])
                elif node.op == "get_attr":
                    constants[str(node.target)] = attrgetter(str(node.target))(self.nodes[node])
        graph.output(tuple(made[self.number(node)] for node in held))
        return lazy_module(constants, graph), tuple(inputs)

    def _forward(self, held: Sequence[fx.Node], saved: Sequence[fx.Node]) -> fx.GraphModule:
        """Return the forward that takes the values `held` as further inputs, and saves its nodes `saved`."""
        old, graph = self.phased.forward, fx.Graph()
        made = {node: placeholder_like(graph, node) for node in _placeholders(old)}
        given = {self.number(node): placeholder_like(graph, node) for node in held}
        made |= self._calls_of(old, given)
        results = _results(old)[: len(self.phased.forward_outputs)]
        chosen = set(held)
        _copy_needed(old, [*results, *(node for node in saved if node not in chosen)], graph, made)
        kept = [given[self.number(node)] if node in chosen else made[node] for node in saved]
        graph.output((*(made[node] for node in results), *kept))
        return lazy_module(old, graph)

    def _backward(self, held: Sequence[fx.Node]) -> tuple[fx.GraphModule, dict[str, fx.Node]]:
        """Return the backward that takes the values `held`, and a dict of the saved values that it takes.

        A key of the dict is the name of a placeholder of the backward. The value is the node of the old forward.
        """
        old, graph = self.phased.backward, fx.Graph()
        by_number = {self.number(node): node for node in held}
        taken = self._calls_of(old, by_number)
        reached = needed(_results(old), taken)
        made: dict[fx.Node, fx.Node] = {}
        given: dict[int, fx.Node] = {}
        saved: dict[str, fx.Node] = {}
        for node in _placeholders(old):
            if node in self.kept and node in reached:
                made[node] = placeholder_like(graph, node)
                saved[node.name] = self.kept[node]
                given.setdefault(self.number(node), made[node])
        for node, source in taken.items():
            if node in reached and self.number(node) not in given:
                given[self.number(node)] = placeholder_like(graph, node)
                saved[node.name] = source
        made |= {node: placeholder_like(graph, node) for node in _placeholders(old) if node not in self.kept}
        made |= {node: given[self.number(node)] for node in taken if node in reached}
        _copy_needed(old, _results(old), graph, made)
        graph.output(tuple(made[node] for node in _results(old)))
        return lazy_module(old, graph), saved

    def _calls_of(self, graph_module: fx.GraphModule, given: Mapping[int, fx.Node]) -> dict[fx.Node, fx.Node]:
        """Return the node that replaces each shared call of a phase, by call.

        `given` has the replacing nodes by value number.
        """
        calls = (node for node, owner in self.nodes.items() if owner is graph_module and node.op == "call_function")
        return {node: given[self.number(node)] for node in calls if self.number(node) in given}


def _may_be_shared(node: fx.Node) -> bool:
    """Whether a call gives equal results for equal operands, and is no copy to or from the host."""
    return node.target not in TRANSFERS and not draws_numbers(node.target)


def _owns_memory(node: fx.Node) -> bool:
    """Whether a call's result is a tensor in memory of its own.

    Views do not own memory. A collective's result is a new tensor only after its wait.
    """
    if node.op != "call_function" or not isinstance(node.meta.get("val"), Tensor):
        return False
    if node.target is getitem:
        return isinstance(node.all_input_nodes[0].meta.get("val"), (tuple, list))
    if node.target in _MAY_COPY:
        return not node.all_input_nodes[0].meta["val"].is_contiguous()
    return node.target is _WAIT or not (aliased_operands(node) or _is_collective(node))


def _is_collective(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "_c10d_functional"


def _placeholders(graph_module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in graph_module.graph.nodes if node.op == "placeholder"]


def _results(graph_module: fx.GraphModule) -> list[fx.Node]:
    return list(graph_module.graph.output_node().args[0])  # type: ignore[arg-type]


def _copy_needed(
    old: fx.GraphModule, results: Iterable[fx.Node], graph: fx.Graph, made: dict[fx.Node, fx.Node]
) -> None:
    """Copy to `graph` the nodes of `old` that `results` need and `made` lacks, and record them in `made`."""
    found = needed(results, made)
    for node in old.graph.nodes:
        if node in found and node not in made:
            made[node] = copy_node(graph, node, made.__getitem__)
