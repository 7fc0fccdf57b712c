"""Count the bytes of a rank's storages while a graph of local operators runs.

An operator's result takes memory from its call to its last use, including uses through views. Allocations inside
kernels are counted for a few operators only (`workspaces`). Values on the host take no device memory. A constant of the
program takes memory once, throughout.

A program may leave out units of blocks (`autoshard.ir.repeat`). The first unit after the gap stands for them: each of
its storages counts once more for every unit left out. In each phase the left-out units run between the two units beside
the gap, so their storages begin and end there (`_Lives.spans`). The peak is never inside a left-out unit, because one
of these two units uses at least as much memory (`passes.strategies.repeated`).
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import fx

from autoshard.ir.collectives import holds_operand, is_wait, reduces_in_place
from autoshard.kernels.offload import to_host
from passes.strategies.collective_nodes import size_in_whole_program
from passes.strategies.local_units import LocalUnits
from passes.strategies.repeated import AFTER_GAP, BEFORE_GAP
from passes.strategies.tensor_infos import bytes_in
from passes.strategies.workspaces import workspace_bytes

PARAMETERS, STATE, GRADIENTS, INPUTS, ACTIVATIONS = PARTS = (
    "parameters", "optimizer state", "gradients", "inputs", "activations"
)  # fmt: skip


@dataclass(slots=True, eq=False)
class Storage:
    """The memory of one tensor on a rank: `size` bytes, in the category `part` of `PARTS`.

    `left_out` is the bytes of the tensor's copies in the left-out units of a repeat. `repeat` is the number of this
    repeat, or -1 without copies.
    """

    size: int
    part: str = ACTIVATIONS
    left_out: float = 0.0
    repeat: int = -1

    @property
    def bytes(self) -> float:
        """Bytes of this tensor, and of its copies in all left-out units."""
        return self.size + self.left_out


Value = tuple[Storage, ...]
"""The storages of one value, one for each result of its operator."""

_ALL_THERE = LocalUnits((), {})


@dataclass(slots=True)
class Storages:
    """The peak of a rank's bytes over all graphs walked so far, and the bytes of each category at that peak.

    `units` has the repeated units of the program, of which some are left out. `constants` has the value of each
    constant by its name.
    """

    units: LocalUnits = _ALL_THERE
    peak: int = 0
    parts: dict[str, int] = field(default_factory=dict)
    constants: dict[str, Value] = field(default_factory=dict)

    def new(self, size: int, part: str = ACTIVATIONS, node: fx.Node | None = None) -> Value:
        """Return a value with one new storage of `size` bytes.

        If `node`, which makes the value, stands for nodes of left-out units, the storage counts their copies too.
        """
        spot = None if node is None else self.units.spot(node)
        if spot is None or spot.unit != AFTER_GAP:
            return (Storage(size if node is None else round(size_in_whole_program(node, size)), part),)
        return (Storage(size, part, float(size * self.units.repeats[spot.repeat].left_out), spot.repeat),)

    def hold_constants(self, graphs: Iterable[fx.Graph]) -> list[Value]:
        """Return a new value for each constant that the graphs read. All nodes of one name read one constant.

        If only left-out units and the unit that stands for them have the constant, their copies count too.
        """
        nodes = defaultdict[str, list[fx.Node]](list)
        for node in (node for graph in graphs for node in graph.find_nodes(op="get_attr")):
            nodes[str(node.target)].append(node)
        for name, alike in nodes.items():
            spots = map(self.units.spot, alike)
            is_of_units = all(spot is not None and spot.unit == AFTER_GAP for spot in spots)
            size = bytes_in(alike[0].meta["val"])
            self.constants[name] = self.new(size, INPUTS, alike[0] if is_of_units else None)
        return list(self.constants.values())

    def bytes_of(self, values: Iterable[Value]) -> int:
        """Return the bytes of the storages of some values. A shared storage counts once."""
        return round(sum(storage.bytes for storage in _distinct(values)))

    def run(
        self, graph: fx.Graph, inputs: Iterable[Value], held: Iterable[Value] = (), part: str = ACTIVATIONS
    ) -> list[Value]:
        """Walk through a graph, update the peak, and return the storages of the graph's results.

        Args:
            graph: local operators with their values in `meta["val"]`; it returns a flat tuple.
            inputs: the values of the graph's placeholders, each freed after its last use in the graph.
            held: values that stay in memory throughout; some may also be inputs.
            part: the category of the results that the graph makes.
        """
        nodes = list(graph.nodes)
        given, where, lives = iter(inputs), dict[fx.Node, Value](), _Lives(self.units, nodes)
        beside = np.zeros(len(nodes))
        for point, node in enumerate(nodes):
            if node.op == "output":
                break
            where[node] = next(given) if node.op == "placeholder" else self._made(node, where)
            lives.use(where[node], point, is_given=node.op == "placeholder")
            for operand in _needed_by(node):
                lives.use(where[operand], point)
            beside[point] = workspace_bytes(node)
        results = [where[result] for result in graph.output_node().args[0]]  # type: ignore[union-attr]
        lives.keep(results)
        for storage in _distinct(results):
            storage.part = part if storage.part == ACTIVATIONS else storage.part
        lives.keep(held, from_start=True)
        self._find_peak(list(lives.spans()), beside)
        return results

    def _find_peak(self, spans: Sequence[tuple[Storage, float, int, int]], beside: np.ndarray) -> None:
        change = np.zeros(len(beside) + 1)
        sizes = np.array([size for _, size, _, _ in spans])
        births, ends = (np.array([span[place] for span in spans], dtype=np.int64) for place in (2, 3))
        np.add.at(change, births, sizes)
        np.subtract.at(change, ends + 1, sizes)
        used = np.cumsum(change)[:-1] + beside
        if len(used) and used.max() > self.peak:
            point = int(used.argmax())
            there = [(storage.part, size) for storage, size, birth, end in spans if birth <= point <= end]
            self._note([*there, (ACTIVATIONS, float(beside[point]))])

    def _note(self, there: Sequence[tuple[str, float]]) -> None:
        parts = {part: round(sum(size for name, size in there if name == part)) for part in PARTS}
        if sum(parts.values()) > self.peak:
            self.peak, self.parts = sum(parts.values()), parts

    def _made(self, node: fx.Node, where: dict[fx.Node, Value]) -> Value:
        """Return the storages of a node's results.

        A view has the storages of its operand. Other nodes make new storages.
        """
        if node.op == "get_attr" and str(node.target) in self.constants:
            return self.constants[str(node.target)]
        if node.target is to_host:
            return self.new(0)
        value = node.meta.get("val")
        operands = [operand for operand in _sources(node) if where.get(operand)]
        if node.target is operator.getitem and operands:
            storages = where[operands[0]]
            return storages if len(storages) == 1 else (storages[int(node.args[1])],)  # type: ignore[call-overload]
        if operands and _shares_memory(node, operands[0]):
            return where[operands[0]]
        tensors = value if isinstance(value, tuple | list) else (value,)
        sizes = (item.numel() * item.element_size() if isinstance(item, torch.Tensor) else 0 for item in tensors)
        return tuple(storage for size in sizes for storage in self.new(size, node=node))


@dataclass(slots=True)
class _Lives:
    """The first and the last point at which each storage is in use. A point is the index of a node in the graph.

    `given` has the storages that exist before the graph runs.
    """

    units: LocalUnits
    nodes: Sequence[fx.Node]
    births: dict[Storage, int] = field(default_factory=dict)
    ends: dict[Storage, int] = field(default_factory=dict)
    given: set[Storage] = field(default_factory=set)

    def use(self, value: Value, point: int, *, is_given: bool = False) -> None:
        for storage in value:
            if storage not in self.births:
                self.births[storage] = point
                if is_given:
                    self.given.add(storage)
            self.ends[storage] = point

    def keep(self, values: Iterable[Value], *, from_start: bool = False) -> None:
        for storage in _distinct(values):
            if from_start:
                self.births[storage] = 0
                self.given.add(storage)
            self.ends[storage] = len(self.nodes) - 1

    def spans(self) -> Iterator[tuple[Storage, float, int, int]]:
        """Yield (storage, bytes, first point, last point) for each storage and for its copies in left-out units.

        Copies that left-out units make begin at the point at which these units run (`_gaps`). Copies that left-out
        units read last end there.
        """
        gaps = self._gaps()
        for storage, birth in self.births.items():
            end = self.ends[storage]
            yield storage, storage.size, birth, end
            if not storage.left_out:
                continue
            gap = gaps.get(storage.repeat, 0)
            reader = self.units.spot(self.nodes[end])
            is_read_by_units = reader is not None and reader.repeat == storage.repeat
            first, last = birth if storage in self.given else gap, gap - 1 if is_read_by_units else end
            if first <= last:
                yield storage, storage.left_out, first, last

    def _gaps(self) -> Mapping[int, int]:
        """Return the point at which the left-out units of each repeat run, by the index of the repeat.

        The point lies between the nodes of the two units beside the gap. Passes may have moved nodes of the two units
        past each other. So the point is chosen such that half of these nodes lie before it.
        """
        beside = defaultdict[int, list[int]](list)
        for point, node in enumerate(self.nodes if self.units.repeats else ()):
            spot = self.units.spot(node) if node.op == "call_function" else None
            if spot is not None and spot.unit in (BEFORE_GAP, AFTER_GAP):
                beside[spot.repeat].append(point)
        return {repeat: points[len(points) // 2] for repeat, points in beside.items()}


def _distinct(values: Iterable[Value]) -> Iterable[Storage]:
    return dict.fromkeys(storage for value in values for storage in value)


def _needed_by(node: fx.Node) -> list[fx.Node]:
    """Return a node's operands and, if the node waits for a collective, the tensors that the collective sends."""
    operands = list(node.all_input_nodes)
    sent = [value for item in operands if is_wait(node) and holds_operand(item) for value in item.all_input_nodes]
    return list(dict.fromkeys((*operands, *sent)))


def _sources(node: fx.Node) -> list[fx.Node]:
    """Return the operands of a call. If the call writes its result into an operand `out=`, this operand comes first."""
    given = node.kwargs.get("out")
    return [given, *node.all_input_nodes] if isinstance(given, fx.Node) else node.all_input_nodes


def _shares_memory(node: fx.Node, source: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if is_wait(node) or reduces_in_place(node):
        return True
    if target is torch.ops.aten.contiguous.default:
        value = source.meta.get("val")
        return isinstance(value, torch.Tensor) and value.is_contiguous()
    return any(item.alias_info is not None for item in target._schema.returns)
