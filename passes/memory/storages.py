"""Count the bytes of a rank's storages while a graph of local operators runs: each from its making to its last use.

An operator's results take memory from its run to the last use of them or of a view of them, as graphs run where each
value is freed after its last use. What a kernel allocates inside is counted for few (`workspaces`); what lies on the
host takes none.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import fx

from autoshard.ir.collectives import holds_operand, is_wait, reduces_in_place
from autoshard.kernels.offload import to_host
from passes.memory.workspaces import workspace_bytes

Storage = tuple[int, ...]
"""The numbers of the storages of one value: several for an operator with several results."""


@dataclass(slots=True)
class Storages:
    """Sizes of storages by number, and the most bytes that were in use at once."""

    sizes: list[int] = field(default_factory=list)
    peak: int = 0

    def new(self, size: int) -> Storage:
        """A storage of so many bytes."""
        self.sizes.append(size)
        return (len(self.sizes) - 1,)

    def bytes_of(self, values: Iterable[Storage]) -> int:
        """Bytes of the storages of some values."""
        return sum(self.sizes[number] for number in {number for value in values for number in value})

    def run(self, graph: fx.Graph, inputs: Iterable[Storage], held: Iterable[Storage] = ()) -> list[Storage]:
        """Walk through a graph; the storages of its results.

        Args:
            graph: local operators with their values in `meta["val"]`; returns a flat tuple.
            inputs: what its placeholders stand for, each freed after its last use here.
            held: what stays in memory throughout, inputs among it or not.
        """
        nodes = list(graph.nodes)
        last = {operand: node for node in nodes for operand in _needed_by(node)}
        always = {number for value in held for number in value}
        given = iter(inputs)
        where: dict[fx.Node, Storage] = {}
        uses: Counter[int] = Counter()
        live = sum(self.sizes[number] for number in always)
        for node in nodes:
            if node.op == "output":
                return [where[result] for result in node.args[0]]
            where[node] = next(given) if node.op == "placeholder" else self._made(node, where)
            for number in where[node]:
                live += self.sizes[number] if uses[number] == 0 and number not in always else 0
                uses[number] += 1
            self.peak = max(self.peak, live + workspace_bytes(node))
            gone = [operand for operand in _needed_by(node) if last[operand] is node]
            for operand in (*gone, *(() if node in last else (node,))):
                for number in where[operand]:
                    uses[number] -= 1
                    live -= self.sizes[number] if uses[number] == 0 and number not in always else 0
        return []

    def _made(self, node: fx.Node, where: dict[fx.Node, Storage]) -> Storage:
        """The storages of a node's results: new ones, or those that it views."""
        if node.target is to_host:
            return self.new(0)
        value = node.meta.get("val")
        operands = [operand for operand in _sources(node) if where.get(operand)]
        if node.target is operator.getitem and operands:
            numbers = where[operands[0]]
            return numbers if len(numbers) == 1 else (numbers[int(node.args[1])],)  # type: ignore[call-overload]
        if operands and _shares_memory(node, operands[0]):
            return where[operands[0]]
        tensors = value if isinstance(value, tuple | list) else (value,)
        sizes = (item.numel() * item.element_size() if isinstance(item, torch.Tensor) else 0 for item in tensors)
        return tuple(number for size in sizes for number in self.new(size))


def _needed_by(node: fx.Node) -> list[fx.Node]:
    """What must be in memory while a node runs: its operands, and what the collective that it waits for sends."""
    operands = list(node.all_input_nodes)
    sent = [value for item in operands if is_wait(node) and holds_operand(item) for value in item.all_input_nodes]
    return list(dict.fromkeys((*operands, *sent)))


def _sources(node: fx.Node) -> list[fx.Node]:
    """The operands of a call, first the one that it writes if it gives that back."""
    given = node.kwargs.get("out")
    return [given, *node.all_input_nodes] if isinstance(given, fx.Node) else node.all_input_nodes


def _shares_memory(node: fx.Node, source: fx.Node) -> bool:
    """Whether a call gives the memory of its first tensor."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if is_wait(node) or reduces_in_place(node):
        return True
    if target is torch.ops.aten.contiguous.default:
        value = source.meta.get("val")
        return isinstance(value, torch.Tensor) and value.is_contiguous()
    return any(item.alias_info is not None for item in target._schema.returns)
