"""Count the work and memory of each layer class of a folded program, from which any recipe is priced.

A layer class has kernels, with their operators and tensors, collectives on each axis, and values that it saves. The
size of a tensor is linear in the batch, and each dim has the axes that split it.

Each call of the program is a kernel, with these exceptions, which hold for the usual training libraries:

* The product before a bias adds the bias (cuBLASLt's epilogue, `addmm`).
* A copy that only changes the layout in memory is not made next to attention or a batched product. Their kernels read
  and write strided tensors.
* Position tables, causal masks and all other values that depend on no input or parameter are made once, not per step.
* A chain of memory-bound calls is one kernel (`chains.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

import autoshard.kernels as kernels
from autoshard.ir.program import InputKind, OutputKind, tensor_values
from autoshard.ir.spec import PartitionSpec
from passes.search.layers.chains import Chains
from passes.search.layers.fold_program import FoldedProgram, is_layout
from passes.search.layers.propagate_axis import LAYERS, AxisLayout, MoveKind
from passes.search.layers.trace_values import (
    attention_cores,
    depending,
    is_free,
    makers_of_outputs,
    readers_of,
    source_of,
)
from passes.strategies.enumerate_strategies import operands_of
from passes.strategies.operator_names import dtype_name, operator_name
from passes.strategies.workspaces import workspace_bytes

_Key = tuple[str, int]
FUSED = "fused"
"""`LayerKernel.operator` of a kernel that runs a chain of several calls."""
aten = torch.ops.aten
_PRODUCTS = frozenset({aten.mm.default, aten.bmm.default})
_EXCHANGED: Mapping[Any, Any] = {
    kernels.experts: kernels.exchanged_experts,
    kernels.experts_backward: kernels.exchanged_experts_backward,
}


@dataclass(frozen=True, slots=True)
class Sized:
    """A tensor whose shape is linear in the number of sequences: `first + step * (batch - 1)` for each dim.

    Args:
        first: the global shape for one sequence.
        step: the growth of each dim with each further sequence.
        itemsize, dtype: bytes of an element, and the name of the dtype.
        splits: for each dim, the axes of the recipe that split the dim.
    """

    first: tuple[int, ...]
    step: tuple[int, ...]
    itemsize: int
    dtype: str
    splits: tuple[tuple[str, ...], ...]

    def shape(self, batch: int, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape on one rank for `batch` sequences; `sizes` has the number of ranks of each axis."""
        result = []
        for first, step, axes in zip(self.first, self.step, self.splits, strict=True):
            dim = first + step * (batch - 1)
            for axis in axes:
                dim = -(-dim // sizes[axis])
            result.append(dim)
        return tuple(result)

    def local_bytes(self, batch: int, sizes: Mapping[str, int]) -> int:
        """Return the bytes on one rank for `batch` sequences; `sizes` has the number of ranks of each axis."""
        return math.prod(self.shape(batch, sizes)) * self.itemsize


@dataclass(frozen=True, slots=True)
class LayerKernel:
    """A kernel on the device: one call, or a fused chain of calls.

    Args:
        operator: name of the call's operator in the cost models; `FUSED` for a chain.
        inputs, outputs: tensors that the kernel reads and writes.
        arguments: positional arguments of the call, with None for tensors, as `cost_models.operators.work` takes them.
        has_weight: whether an operand is a parameter, or a view of one.
        makes_gradient: whether a result is a parameter's gradient.
        is_core: whether all calls of the kernel belong to attention's core, between its first and its last product.
    """

    operator: str
    inputs: tuple[Sized, ...]
    outputs: tuple[Sized, ...]
    arguments: tuple[object, ...]
    has_weight: bool
    makes_gradient: bool
    is_core: bool


@dataclass(frozen=True, slots=True)
class Sent:
    """A collective over one axis.

    `value` is the exchanged tensor as if this axis did not split it. All other axes split it as in the layout.
    """

    axis: str
    kind: MoveKind
    value: Sized


@dataclass(frozen=True, slots=True)
class Phase:
    """The kernels and collectives of one layer in one phase, forward or backward."""

    kernels: tuple[LayerKernel, ...]
    sent: tuple[Sent, ...]


@dataclass(frozen=True, slots=True)
class Saved:
    """A value that the forward keeps for the backward.

    Args:
        is_core: whether the value belongs to attention's core.
        is_operand: whether the backward reads the value only in products that compute gradients of parameters. Such a
            value may be stored in the precision of these products.
    """

    value: Sized
    is_core: bool
    is_operand: bool


@dataclass(frozen=True, slots=True)
class LayerClass:
    """The work and memory of one layer of a class.

    Args:
        saved: the values that the forward keeps for the backward.
        entering: the values of other layer classes that the forward reads. A recomputed layer keeps only these values.
        parameters: the parameters by qualified name.
        expert_parameters: the names of the parameters that the expert axis splits.
        frozen: the names of the parameters that have no gradient.
        workspaces: for each kernel, the values that it reads or writes and that are freed before the next phase.
    """

    forward: Phase
    backward: Phase
    saved: tuple[Saved, ...]
    entering: tuple[Sized, ...]
    parameters: Mapping[str, Sized]
    expert_parameters: frozenset[str]
    frozen: frozenset[str]
    workspaces: tuple[tuple[Sized, ...], ...]

    @property
    def splits(self) -> frozenset[tuple[int, tuple[str, ...]]]:
        """The dims that axes split in the tensors of the layer class.

        A pair has the dim's size for one sequence, and the axes that split the dim.
        """
        kernels = (*self.forward.kernels, *self.backward.kernels)
        values = [*self.parameters.values(), *(each for item in kernels for each in (*item.inputs, *item.outputs))]
        dims = (pair for value in values for pair in zip(value.first, value.splits, strict=True))
        return frozenset((dim, axes) for dim, axes in dims if axes)


def count_layers(folded: FoldedProgram, layouts: Mapping[str, AxisLayout], *, fused: bool) -> dict[str, LayerClass]:
    """Return every layer class of a folded program, by name.

    Args:
        layouts: axis → how the axis splits the program.
        fused: whether a chain of memory-bound calls is one kernel.
    """
    counter = _LayerCounter(folded, layouts, fused=fused)
    return {name: counter.layer(name) for name in folded.layers}


class _LayerCounter:
    def __init__(self, folded: FoldedProgram, layouts: Mapping[str, AxisLayout], *, fused: bool) -> None:
        self.folded, self.layouts = folded, layouts
        self.nodes = folded.single.nodes_by_name()
        self.slots = {slot.node: slot for slot in folded.single.inputs}
        self.gradients = makers_of_outputs(folded)
        self.trained = {slot.name for slot in folded.single.outputs if slot.kind is OutputKind.GRADIENT}
        self.core = attention_cores(folded)
        self.varying = depending(folded, {slot.node for slot in folded.single.inputs if slot.kind != InputKind.SEED})
        order = [node for node in folded.single.graph.nodes if _works(node, self.varying)]
        self.chains = Chains(folded, frozenset(node.name for node in order), self.varying, fused=fused)
        self.calls: dict[tuple[str | None, str], list[fx.Node]] = {}
        for node in order:
            self.calls.setdefault((folded.layer_of.get(node.name), node.meta["phase"]), []).append(node)

    def layer(self, name: str) -> LayerClass:
        nodes, expert = self.folded.parameters.get(name, ()), self.layouts.get("expert")
        shared = (node for node in nodes if expert is not None and expert.dim_of((node, 0)) is not None)
        parameters = {self.slots[node].name: self._sized(self.nodes[node], 0) for node in nodes}
        return LayerClass(
            self._phase(name, "forward"), self._phase(name, "backward"), self._saved(name), self._entering(name),
            parameters, frozenset(self.slots[node].name for node in shared),
            frozenset(parameters.keys() - self.trained), self._workspaces(name),
        )  # fmt: skip

    def _phase(self, layer: str, phase: str) -> Phase:
        kernels = [self._kernel(chain) for chain in self._chains_in(layer, phase)]
        return Phase(tuple(kernels), tuple(self._sent(layer, phase)))

    def _chains_in(self, layer: str, phase: str) -> list[list[fx.Node]]:
        """Return the calls of a layer class that run kernels in a phase, one list for each chain."""
        chains: dict[str, list[fx.Node]] = {}
        for node in self.calls.get((layer, phase), ()):
            chains.setdefault(self.chains.chain_of(node), []).append(node)
        return list(chains.values())

    # Kernels.

    def _kernel(self, chain: list[fx.Node]) -> LayerKernel:
        last, is_fused = chain[-1], len(chain) > 1
        read = [self._operand(node, index) for node, index in self.chains.operands(chain)]
        written = [self._sized(node, index) for node, index in self._written(chain)]
        operator = FUSED if is_fused else self._operator(last)
        arguments = () if is_fused else tuple(fx.map_arg(last.args, lambda argument: None))
        return LayerKernel(
            operator, tuple(read), tuple(written), arguments,
            has_weight=self._reads_weight(last),
            makes_gradient=last.name in self.gradients and last.target not in LAYERS,
            is_core=all(node.name in self.core for node in chain),
        )  # fmt: skip

    def _operator(self, node: fx.Node) -> str:
        """Return the name of a call's operator in the cost models.

        A layer of experts that are shared out over ranks has another name than a layer with all experts.
        """
        is_shared = node.target in LAYERS and "expert" in self.layouts
        return str(_EXCHANGED[node.target]) if is_shared else operator_name(node)

    def _rows(self, layer: fx.Node, width: int | None = None) -> Sized:
        """Return a tensor with one row for each token and each of its experts.

        `layer` is the call of the experts' operator. A row has `width` elements; None: as many as a token.
        """
        is_backward = layer.target is kernels.experts_backward
        x, index = (self._operand(layer, place + is_backward) for place in (0, 1))
        each, splits = index.first[1], (x.splits[0], ())
        first, step = (x.first[0] * each, width or x.first[1]), (x.step[0] * each, 0)
        return Sized(first, step, x.itemsize, x.dtype, splits)

    def _written(self, chain: list[fx.Node]) -> list[tuple[fx.Node, int]]:
        """Return the results that a chain writes to memory, each as a call and the index of its result."""
        inside = {node.name for node in chain}
        return [
            (node, index)
            for node in chain
            for index, value in enumerate(tensor_values(node))
            if value is not None and (node is chain[-1] or self._is_read_outside(node, index, inside))
        ]

    def _is_read_outside(self, node: fx.Node, index: int, inside: set[str]) -> bool:
        readers = self.chains.readers(node, index)
        return not readers_of(node, index) or any(item.name not in inside for item in readers)

    # Sizes.

    def _operand(self, node: fx.Node, index: int) -> Sized:
        one = operands_of(node)[index].meta["val"]
        two = operands_of(self.folded.twin[node.name])[index].meta["val"]
        specs = {axis: layout.operands[node.name][index] for axis, layout in self.layouts.items()}
        return _sized(one, two, specs)

    def _sized(self, node: fx.Node, index: int) -> Sized:
        """Return the tensor that is result number `index` of a node.

        `index` also counts results that are None.
        """
        values = tensor_values(node)
        one = values[index]
        assert one is not None
        two = tensor_values(self.folded.twin[node.name])[index]
        assert two is not None
        position = sum(value is not None for value in values[:index])
        specs = {axis: layout.results[node.name][position] for axis, layout in self.layouts.items()}
        return _sized(one, two, specs)

    # Memory.

    def _saved(self, layer: str) -> tuple[Saved, ...]:
        found: dict[str, Saved] = {}
        for node in self.folded.single.graph.nodes:
            if node.op != "call_function" or is_layout(node) or node.meta["phase"] != "forward":
                continue
            if self.folded.layer_of.get(node.name) != layer or node.name not in self.varying:
                continue
            for index, value in enumerate(tensor_values(node)):
                if value is not None and (late := self._late_readers(node, index)):
                    is_operand = all(item.name in self.gradients and item.target in _PRODUCTS for item in late)
                    found[f"{node.name}:{index}"] = Saved(self._sized(node, index), node.name in self.core, is_operand)
        return tuple(found.values())

    def _late_readers(self, node: fx.Node, index: int) -> list[fx.Node]:
        return [item for item in self.chains.readers(node, index) if item.meta["phase"] == "backward"]

    def _workspaces(self, layer: str) -> tuple[tuple[Sized, ...], ...]:
        """Return for each kernel of a layer class the values that are in memory only within the kernel's phase.

        A value and its views count once.
        """
        found: dict[tuple[Sized, ...], None] = {}
        for phase in ("forward", "backward"):
            for chain in self._chains_in(layer, phase):
                if self._sums_gradients(chain):
                    continue
                read = [source_of(operands_of(node)[index]) for node, index in self.chains.operands(chain)]
                values = dict.fromkeys((*read, *self._written(chain)))
                passing = [self._sized(*value) for value in values if self._passes(*value, phase)]
                passing += [self._inside(node) for node in chain if node.target in LAYERS]
                found[tuple(passing)] = None
        return tuple(found)

    def _inside(self, layer: fx.Node) -> Sized:
        """Return a tensor as large as the temporary memory of a call of experts.

        Dim 0 has one row for each token and each of its experts.
        """
        rows = self._rows(layer, 1)
        width = math.ceil(workspace_bytes(layer) / (math.prod(rows.first) * rows.itemsize))
        return replace(rows, first=(rows.first[0], width))

    def _sums_gradients(self, chain: list[fx.Node]) -> bool:
        """Whether a chain adds up a parameter's gradient in place."""
        return chain[-1].name in self.gradients and all(node.target is aten.add.Tensor for node in chain)

    def _passes(self, node: fx.Node, index: int, phase: str) -> bool:
        """Whether result `index` of a node is made in the phase `phase`, and freed before the next phase.

        An example is a value that the backward recomputes.
        """
        if node.op != "call_function" or node.name not in self.varying or node.meta["phase"] != phase:
            return False
        return phase == "backward" or not self._late_readers(node, index)

    def _entering(self, layer: str) -> tuple[Sized, ...]:
        found: dict[str, Sized] = {}
        for node in self.calls.get((layer, "forward"), ()):
            for operand in operands_of(node):
                owner, index = source_of(operand)
                place = self.folded.layer_of.get(owner.name)
                if place not in (layer, None) and owner.name in self.varying:
                    found[f"{owner.name}:{index}"] = self._sized(owner, index)
        return tuple(found.values())

    # Collectives.

    def _sent(self, layer: str, phase: str) -> list[Sent]:
        sent = []
        for axis, layout in self.layouts.items():
            for move in layout.moves:
                reader = self.nodes[move.reader]
                if reader.op == "placeholder" or self.folded.layer_of.get(reader.name) != layer:
                    continue
                owner, _ = source_of(self.nodes[move.value[0]])
                if reader.meta["phase"] != phase or owner.name not in self.varying:
                    continue
                value = self._base_value(move.value)
                others = tuple(tuple(name for name in axes if name != axis) for axes in value.splits)
                value = Sized(value.first, value.step, value.itemsize, value.dtype, others)
                sent.append(Sent(axis, move.kind, value))
        return sent + self._exchanged(layer, phase)

    def _exchanged(self, layer: str, phase: str) -> list[Sent]:
        """Return the all-to-alls that the experts of a layer class need in a phase.

        In the forward, the rows of tokens go to the ranks of their experts, and results come back. In the backward,
        rows and gradients of results go to the experts' ranks, and gradients of rows come back.
        """
        if "expert" not in self.layouts:
            return []
        layers = [node for node in self.calls.get((layer, phase), ()) if node.target in LAYERS]
        times = 2 if phase == "forward" else 3
        return [Sent("expert", MoveKind.EXCHANGE, self._rows(node)) for node in layers] * times

    def _base_value(self, key: _Key) -> Sized:
        """Return the tensor that owns the memory of the value `key`.

        If the value is a view of only a part of that tensor, return the value itself.
        """
        node = self.nodes[key[0]]
        present = [index for index, value in enumerate(tensor_values(node)) if value is not None]
        value = tensor_values(node)[present[key[1]]]
        owner, index = source_of(node)
        whole = tensor_values(owner)[index] if owner.op == "call_function" and owner is not node else None
        if whole is None or value is None or value.numel() != whole.numel():
            return self._sized(node, present[key[1]])
        return self._sized(owner, index)

    def _reads_weight(self, node: fx.Node) -> bool:
        slots = (self.slots.get(source_of(operand)[0].name) for operand in operands_of(node))
        return any(slot is not None and slot.kind == InputKind.PARAMETER for slot in slots)


def _works(node: fx.Node, varying: frozenset[str]) -> bool:
    """Whether a node is a call that runs a kernel in each step.

    `varying` has the names of the values that depend on inputs or parameters.
    """
    return node.op == "call_function" and node.name in varying and not is_free(node) and not _is_bias(node)


def _is_bias(node: fx.Node) -> bool:
    """Whether a call adds a vector to a product that no other call reads."""
    if node.target is not aten.add.Tensor or len(operands_of(node)) != 2:
        return False
    product, bias = operands_of(node)
    return product.target is aten.mm.default and len(product.users) == 1 and bias.meta["val"].ndim == 1


def _sized(one: torch.Tensor, two: torch.Tensor, specs: Mapping[str, PartitionSpec]) -> Sized:
    first = tuple(int(dim) for dim in one.shape)
    step = tuple(int(b) - int(a) for a, b in zip(one.shape, two.shape, strict=True))
    splits = tuple(tuple(axis for axis, spec in specs.items() if spec.axes_of(dim)) for dim in range(len(first)))
    return Sized(first, step, one.dtype.itemsize, dtype_name(one.dtype), splits)
