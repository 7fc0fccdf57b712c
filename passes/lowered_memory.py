"""The most bytes that a lowered program has in use on a rank, by walking through it as it runs.

Each operator's results take memory from its run to the last use of them or of a view of them. Parameters, buffers and
inputs are held throughout, what the forward returns and saves until the backward has used it, outputs (whole, as they
are handed out; pieces of other dims than the first are put together from what is gathered) and gradients to the end.
What a kernel allocates inside is not seen.

The planner's count (`liveness`) is of values and of one copy for each reshard; this one also sees the steps of reshards
and of calls that are rewritten, and that a value is freed before its copy is used.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import fx

from autoshard.ir.lowered import LocalSlot, PhasedProgram

_Storages = tuple[int, ...]


def peak_bytes(phased: PhasedProgram) -> int:
    """The largest number of bytes in use on each rank while the forward and then the backward run."""
    memory = _Memory()
    lowered = phased.lowered
    held = [memory.new(_local_bytes(slot, lowered.mesh)) for slot in lowered.inputs]
    inputs = [held[index] for index in phased.forward_inputs]
    outputs = memory.run(phased.forward, inputs, held)
    count = len(phased.forward_outputs)
    slots = [lowered.outputs[index] for index in phased.forward_outputs]
    handed = [
        value if slot.spec.is_fully_replicated else memory.new(math.prod(slot.shape) * slot.dtype.itemsize)
        for slot, value in zip(slots, outputs[:count], strict=True)
    ]
    gathered = [memory.new(math.prod(slot.shape) * slot.dtype.itemsize) for slot in slots if any(slot.spec.dims[1:])]
    memory.note((*held, *outputs, *handed, *gathered[:1]))
    saved = outputs[count:]
    tangents = [held[index] for index in phased.backward_inputs]
    memory.run(phased.backward, [*saved, *tangents], (*held, *handed))
    return memory.peak


def _local_bytes(slot: LocalSlot, mesh: object) -> int:
    return math.prod(slot.spec.local_shape(slot.shape, mesh)) * slot.dtype.itemsize  # type: ignore[arg-type]


@dataclass(slots=True)
class _Memory:
    """Sizes of storages by number, and the most that were in use at once."""

    sizes: list[int] = field(default_factory=list)
    peak: int = 0

    def new(self, size: int) -> _Storages:
        self.sizes.append(size)
        return (len(self.sizes) - 1,)

    def note(self, values: Iterable[_Storages]) -> None:
        """These are in use at once."""
        used = {number for value in values for number in value}
        self.peak = max(self.peak, sum(self.sizes[number] for number in used))

    def run(self, graph_module: fx.GraphModule, inputs: list[_Storages], held: Iterable[_Storages]) -> list[_Storages]:
        """Walk through a graph that frees each value after its last use; the storages of its results."""
        nodes = list(graph_module.graph.nodes)
        last = {operand: node for node in nodes for operand in node.all_input_nodes}
        always = {number for value in held for number in value}
        given = iter(inputs)
        where: dict[fx.Node, _Storages] = {}
        uses: Counter[int] = Counter()
        live = sum(self.sizes[number] for number in always)
        for node in nodes:
            if node.op == "output":
                return [where[result] for result in node.args[0]]
            where[node] = next(given) if node.op == "placeholder" else self._made(node, where)
            for number in where[node]:
                live += self.sizes[number] if uses[number] == 0 and number not in always else 0
                uses[number] += 1
            self.peak = max(self.peak, live)
            gone = [operand for operand in node.all_input_nodes if last[operand] is node]
            for operand in (*gone, *(() if node in last else (node,))):
                for number in where[operand]:
                    uses[number] -= 1
                    live -= self.sizes[number] if uses[number] == 0 and number not in always else 0
        return []

    def _made(self, node: fx.Node, where: dict[fx.Node, _Storages]) -> _Storages:
        """The storages of a node's results: new ones, or those that it views."""
        value = node.meta.get("val")
        operands = [operand for operand in node.all_input_nodes if where.get(operand)]
        if node.target is operator.getitem and operands:
            numbers = where[operands[0]]
            return numbers if len(numbers) == 1 else (numbers[int(node.args[1])],)  # type: ignore[call-overload]
        if operands and _is_view(node, operands[0]):
            return where[operands[0]]
        tensors = value if isinstance(value, tuple | list) else (value,)
        sizes = (item.numel() * item.element_size() if isinstance(item, torch.Tensor) else 0 for item in tensors)
        return tuple(number for size in sizes for number in self.new(size))


def _is_view(node: fx.Node, source: fx.Node) -> bool:
    """Whether a call gives the memory of its first tensor."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if target is torch.ops._c10d_functional.wait_tensor.default:
        return True
    if target is torch.ops.aten.contiguous.default:
        value = source.meta.get("val")
        return isinstance(value, torch.Tensor) and value.is_contiguous()
    return any(item.alias_info is not None and not item.alias_info.is_write for item in target._schema.returns)
