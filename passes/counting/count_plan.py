"""Count what a plan's step does, in expressions: FLOPs, bytes sent and bytes held, each with the block that it is of.

Counted are the operations of lowering: calls on local shapes, the reshards of their operands and results, and the
collectives inside rewrites. Reshards take the steps that they take at the plan's own sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
from torch import fx

from autoshard.errors import FormulaError, PlanMismatchError
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.program import OWNERS, InputKind, OutputKind, tensor_values
from autoshard.ir.reshard import ReshardKind, ReshardStep, plan_reshard
from autoshard.ir.spec import PartitionSpec
from autoshard.rules.attention import is_ring, splits_queries
from autoshard.rules.enumeration import Strategy
from autoshard.rules.hub import hub
from cost_models.formulas import Size, ceil_div, product_of, size_symbol, value_at
from cost_models.hardware import Cluster
from cost_models.operators import work
from cost_models.work import Kind, TensorInfo
from passes.counting.symbolic_program import BlockPlace, Shape, SymbolicProgram
from passes.lowering.lower import result_key
from passes.preparation.canonicalize import is_view
from passes.recomputation.recompute import original_of
from passes.strategies.enumerate_strategies import Site, ValueInfo, operands_of, resolve, rule_of
from passes.strategies.match_strategy import match_strategy
from passes.strategies.operator_names import dtype_name, operator_name
from passes.strategies.price import StepPrice
from passes.strategies.price_rewrites import emitted_collectives
from passes.strategies.scratch import unread_operands

Counted = tuple[BlockPlace | None, Size]
"""A part of a count, and the block that it belongs to."""


@dataclass(frozen=True, slots=True)
class Read:
    """A value (a node's result) that a call reads, or that leaves the program.

    Args:
        tail, result: the node that yields it, and which of its tensors.
        source, target: its specs as made, and as read.
        reader: the call, or the node of what the value is a gradient or update of; None for an output.
        slot: the result of the program, or None for a call's operand.
        operand: which operand of the call.
    """

    tail: fx.Node
    result: int
    source: PartitionSpec
    target: PartitionSpec
    reader: fx.Node | None
    slot: str | None = None
    operand: int | None = None


@dataclass
class PlanCounting:
    """Counts of one plan.

    Args:
        symbolic: the prepared program that the plan is for.
        plan: the plan.
        axes: size of each mesh axis, a symbol or a number.
        cluster: that the plan was priced for; decides between reshards of equal effect.
    """

    symbolic: SymbolicProgram
    plan: Plan
    axes: Mapping[str, Size]
    cluster: Cluster
    _flops: dict[Any, Size] = field(default_factory=dict)
    _unread: dict[str, frozenset[int]] = field(default_factory=dict)

    # FLOPs.

    def step_flops(self) -> Iterator[Counted]:
        """Of products and attention, on global shapes; what is recomputed counts once."""
        return self._contractions(is_local=False)

    def rank_flops(self) -> Iterator[Counted]:
        """The same, of what each rank runs."""
        return self._contractions(is_local=True)

    def _contractions(self, *, is_local: bool) -> Iterator[Counted]:
        for node in self._calls():
            if not is_local and original_of(node) is not None:
                continue
            if node.target is not hub and operands_of(node) and self._contracts(node):
                node_plan = self.plan.nodes[node.name]
                if is_local and is_ring(node.target, node_plan.inputs):
                    raise FormulaError(
                        f"What a rank computes of {node.target} ({node.meta.get('source') or 'unknown line'}) depends "
                        "on how blocks of keys that go round its ranks are paired: that is no formula in sizes. "
                        "formula('step_flops') is of all ranks together; plan.predicted has the time."
                    )
                inputs = self._operand_infos(node, node_plan.inputs if is_local else None)
                outputs = self._result_infos(node, node_plan.outputs if is_local else None)
                arguments = self.symbolic.arguments[node.name]
                if is_local and splits_queries(node.target, node_plan.inputs):
                    *others, offset, global_shape = arguments
                    placed = (*offset[:2], None, *offset[3:])  # each rank has its own first query
                    arguments = (*others, placed, global_shape)
                yield self._place(node), self._flops_of(node, inputs, outputs, arguments)

    def _contracts(self, node: fx.Node) -> bool:
        values = [operand.meta["val"] for operand in operands_of(node)]
        infos = [TensorInfo(tuple(v.shape), v.dtype.itemsize, dtype_name(v.dtype)) for v in values]
        results = [v for v in tensor_values(node) if v is not None]
        outputs = [TensorInfo(tuple(v.shape), v.dtype.itemsize, dtype_name(v.dtype)) for v in results]
        arguments = tuple(fx.map_arg(node.args, lambda argument: None))
        done = work(operator_name(node), infos, outputs, arguments)
        return bool(done.products) or done.kind is Kind.ATTENTION

    def _flops_of(
        self,
        node: fx.Node,
        inputs: Sequence[TensorInfo],
        outputs: Sequence[TensorInfo],
        arguments: tuple[Any, ...],
    ) -> Size:
        key = (operator_name(node), tuple(inputs), tuple(outputs), repr(arguments))
        if key not in self._flops:
            try:
                done = work(operator_name(node), inputs, outputs, arguments)
            except TypeError as error:
                raise FormulaError(
                    f"The FLOPs of {node.target} ({node.meta.get('source') or 'unknown line'}) depend on whether one "
                    "size is larger than another, so they are no formula; hold the sizes of its operands fixed: "
                    f"formula(..., fixed={tuple(size.name for size in self.symbolic.sizes)!r})."
                ) from error
            self._flops[key] = sympy.nsimplify(done.flops, rational=True)
        return self._flops[key]

    def _operand_infos(self, node: fx.Node, specs: Sequence[PartitionSpec] | None) -> list[TensorInfo]:
        operands = operands_of(node)
        shapes = [self._shape(*resolve(operand)) for operand in operands]
        return [
            self._info(shape, operand.meta["val"], None if specs is None else specs[index])
            for index, (shape, operand) in enumerate(zip(shapes, operands, strict=True))
        ]

    def _result_infos(self, node: fx.Node, specs: Sequence[PartitionSpec] | None) -> list[TensorInfo]:
        values = [value for value in tensor_values(node) if value is not None]
        return [
            self._info(shape, value, None if specs is None else specs[index])
            for index, (shape, value) in enumerate(zip(self.symbolic.shapes[node.name], values, strict=True))
        ]

    def _info(self, shape: Shape, value: Any, spec: PartitionSpec | None) -> TensorInfo:
        dims: Any = shape if spec is None else self.local_shape(shape, spec)
        return TensorInfo(dims, value.dtype.itemsize, dtype_name(value.dtype))

    # Communication.

    def sent(self) -> Iterator[tuple[str, BlockPlace | None, Size]]:
        """Axis, block and bytes that each rank sends, of every collective, with ring algorithms; see `ring_bytes`."""
        for read in self.reads():
            place = self._place(read.reader if read.reader is not None else read.tail)
            for step in self.steps(read):
                yield step.axis, place, self._sent_by(step, read)
        for node in self._calls():
            if node.target is not hub:
                for axis, size in self._sent_inside(node):
                    yield axis, self._place(node), size

    def crossing_bytes(self, sends: Mapping[str, int]) -> Iterator[Counted]:
        """Bytes of values that a stage gives to other stages.

        Args:
            sends: name of each value to how often it is sent.
        """
        nodes = self.symbolic.program.nodes_by_name()
        for slot in self.symbolic.program.outputs:
            if slot.name in sends:
                tail, result = resolve(nodes[slot.node])
                size = self._bytes(tail, result, self.plan.outputs[result_key(slot)])
                yield None, sends[slot.name] * size  # at a cut, however many blocks there are

    def steps(self, read: Read) -> tuple[ReshardStep, ...]:
        """The reshard of a value that is read, at the plan's own sizes."""
        value = _value(read.tail, read.result)
        return plan_reshard(
            read.source,
            read.target,
            tuple(value.shape),
            self.plan.mesh,
            itemsize=value.dtype.itemsize,
            cost=StepPrice(self.cluster, self.plan.mesh),
        )

    def _sent_by(self, step: ReshardStep, read: Read) -> Size:
        """Bytes that each rank sends for a step. Pieces of an all-to-all are cut from a local dim, and padded."""
        shape, ranks = self._shape(read.tail, read.result), self.axes[step.axis]
        before, after = (list(self.local_shape(shape, spec)) for spec in (step.source, step.target))
        if step.kind is ReshardKind.ALL_TO_ALL:
            assert step.to_dim is not None
            before[step.to_dim] = ceil_div(before[step.to_dim], ranks) * ranks
        itemsize = _value(read.tail, read.result).dtype.itemsize
        return ring_bytes(step.kind, product_of(before) * itemsize, product_of(after) * itemsize, ranks)

    def _sent_inside(self, node: fx.Node) -> Iterator[tuple[str, Size]]:
        """Axis and bytes of the collectives of a call's rewrite."""
        found = self._emitted(node, self.plan.mesh)
        if not found:
            return
        others = self._other_emissions(node)
        for index, collective in enumerate(found):
            kind = _COLLECTIVES.get(str(collective.target))
            if kind is None:
                raise FormulaError(
                    f"What {node.target} ({node.meta.get('source') or 'unknown line'}) exchanges between ranks by "
                    f"{collective.target} has no formula."
                )
            operand: Any = collective.args[0]
            value, axis = operand.meta["val"], str(collective.args[-1])
            dims = [
                self._fit_dim(
                    node, int(size), [(sizes, int(_payload(seen[index]).shape[dim])) for sizes, seen in others]
                )
                for dim, size in enumerate(value.shape)
            ]
            size = product_of(dims) * value.dtype.itemsize
            after = ceil_div(size, self.axes[axis]) if kind is ReshardKind.REDUCE_SCATTER else size
            yield axis, ring_bytes(kind, size, after, self.axes[axis])

    def _emitted(self, node: fx.Node, mesh: Mesh) -> list[fx.Node]:
        found = self._rewritten(node, mesh)
        return [] if found is None else emitted_collectives(*found, mesh)

    def _rewritten(self, node: fx.Node, mesh: Mesh) -> tuple[Site, Strategy] | None:
        """A call with a local rewrite, and its strategy; None for other calls."""
        rule = rule_of(node)
        if rule is None or rule.local is None:
            return None
        strategy = match_strategy(rule, mesh, self.plan.nodes[node.name], node.name)
        values = tuple(ValueInfo(tuple(v.shape), v.dtype) for v in tensor_values(node) if v is not None)
        return Site(node.name, node, "", (), values, rule), strategy

    def _other_emissions(self, node: fx.Node) -> list[tuple[dict[sympy.Symbol, int], list[fx.Node]]]:
        """The collectives at other sizes of the inputs, and on meshes of which one axis is larger."""
        found = []
        mesh = self.plan.mesh
        for point, nodes in self.symbolic.samples.items():
            found.append((self._sizes(point, mesh), self._emitted(nodes[node.name], mesh)))
        base = tuple(size.value for size in self.symbolic.sizes)
        for axis in mesh.axis_names:
            larger = self._larger(node, axis)
            if larger is not None:
                found.append((self._sizes(base, larger), self._emitted(node, larger)))
        expected = len(found[0][1])
        if any(len(seen) != expected for _, seen in found):
            raise FormulaError(
                f"What {node.target} ({node.meta.get('source') or 'unknown line'}) exchanges between ranks is not the "
                f"same at all sizes, so it is no formula; hold them fixed: formula(..., fixed={self._names()!r})."
            )
        return found

    def _larger(self, node: fx.Node, axis: str) -> Mesh | None:
        """The mesh with the smallest size of an axis, larger than its own, that the call's rule admits."""
        sizes = dict(self.plan.mesh.axes)
        for factor in (2, 3, 4):
            mesh = Mesh({**sizes, axis: factor * sizes[axis]})
            try:
                match_strategy(rule_of(node), mesh, self.plan.nodes[node.name], node.name)
            except PlanMismatchError:
                continue
            return mesh
        return None

    def _sizes(self, point: Sequence[int], mesh: Mesh) -> dict[sympy.Symbol, int]:
        """The value of every symbol."""
        inputs = {size_symbol(size.name): now for size, now in zip(self.symbolic.sizes, point, strict=True)}
        axes = {symbol: mesh.axis_size(axis) for axis, symbol in self.axes.items() if isinstance(symbol, sympy.Symbol)}
        return inputs | axes

    def _names(self) -> tuple[str, ...]:
        return tuple(sorted(str(symbol) for symbol in self._sizes([0] * len(self.symbolic.sizes), self.plan.mesh)))

    def _fit_dim(self, node: fx.Node, size: int, seen: Sequence[tuple[Mapping[sympy.Symbol, int], int]]) -> Size:
        """A dim of what a rewrite sends: the one among the call's local dims, and the number itself, that fits all."""
        node_plan = self.plan.nodes[node.name]
        infos = [*self._operand_infos(node, node_plan.inputs), *self._result_infos(node, node_plan.outputs)]
        candidates: dict[Any, None] = dict.fromkeys([sympy.Integer(size)])
        candidates |= dict.fromkeys(sympy.sympify(dim) for info in infos for dim in info.shape)
        fitting = [item for item in candidates if all(value_at(item, sizes) == found for sizes, found in seen)]
        if len(fitting) != 1:
            found = f"{len(fitting)} of its local sizes fit" if fitting else "none of its local sizes fits"
            raise FormulaError(
                f"What {node.target} ({node.meta.get('source') or 'unknown line'}) exchanges between ranks is no "
                f"formula in all sizes: {found}. Hold some fixed: formula(..., fixed={self._names()!r})."
            )
        return fitting[0]

    # Memory.

    def parameters(self) -> Iterator[Counted]:
        """Elements of the whole model's parameters."""
        for slot in self.symbolic.program.inputs_of(InputKind.PARAMETER):
            yield self.symbolic.places.get(slot.node), product_of(self.symbolic.shapes[slot.node][0])

    def parameter_bytes(self) -> Iterator[Counted]:
        """Of each rank's parameters."""
        nodes = self.symbolic.program.nodes_by_name()
        for slot in self.symbolic.program.inputs_of(InputKind.PARAMETER):
            node = nodes[slot.node]
            yield self._place(node), self._bytes(node, 0, self.plan.nodes[slot.node].outputs[0])

    def gradient_bytes(self) -> Iterator[Counted]:
        """Of each rank's gradients of parameters, as they leave the program, or as its update reads them."""
        if self.symbolic.program.outputs_of(OutputKind.PARAMETER_UPDATE):
            yield from self._read_by_updates()
            return
        wanted = {result_key(slot) for slot in self.symbolic.program.outputs_of(OutputKind.GRADIENT)}
        for read in self.reads():
            if read.slot in wanted:
                yield self._place(read.reader or read.tail), self._bytes(read.tail, read.result, read.target)

    def _read_by_updates(self) -> Iterator[Counted]:
        nodes = self.symbolic.program.nodes_by_name()
        for slot in self.symbolic.program.outputs_of(OutputKind.PARAMETER_UPDATE):
            update, _ = resolve(nodes[slot.node])
            while _is_alias(update):
                update, _ = resolve(update.all_input_nodes[0])
            gradient = operands_of(update)[_GRADIENT]
            spec = self.plan.nodes[update.name].inputs[_GRADIENT]
            yield self._place(update), self._bytes(*resolve(gradient), spec)

    def state_bytes(self) -> Iterator[Counted]:
        """Of each rank's optimizer state, where the program holds it."""
        nodes = self.symbolic.program.nodes_by_name()
        for slot in self.symbolic.program.inputs_of(InputKind.STATE):
            node = nodes[slot.node]
            yield self._place(node), self._bytes(node, 0, self.plan.nodes[slot.node].outputs[0])

    def activation_bytes(self) -> Iterator[Counted]:
        """Of what each rank's forward keeps for its backward, inputs and parameters left out."""
        kept: dict[Any, Counted] = {}
        into: dict[str, Read] = {}
        for read in self.reads():
            if (
                read.slot is None
                and read.reader is not None
                and _is_alias(read.reader)
                and read.reader.name not in into
            ):
                into[read.reader.name] = read  # a view's first operand
        for read in self.reads():
            late = read.reader is None or read.slot is not None or read.reader.meta["phase"] != "forward"
            if late and not self._is_forward_result(read) and not self._is_unread(read):
                self._keep(read.tail, read.result, into, kept)
        yield from kept.values()

    def _is_unread(self, read: Read) -> bool:
        """Whether the rewrite of the call leaves this operand out; what is resharded for it is read by the reshard."""
        if read.reader is None or read.operand is None or read.reader.target is hub or read.source != read.target:
            return False
        if read.reader.name not in self._unread:
            found = self._rewritten(read.reader, self.plan.mesh)
            self._unread[read.reader.name] = frozenset() if found is None else unread_operands(*found, self.plan.mesh)
        return read.operand in self._unread[read.reader.name]

    def _is_forward_result(self, read: Read) -> bool:
        results = (OutputKind.OUTPUT, OutputKind.BUFFER_UPDATE)
        return read.slot is not None and read.slot.startswith(tuple(f"{kind.value} " for kind in results))

    def _keep(self, tail: fx.Node, result: int, into: Mapping[str, Read], kept: dict[Any, Counted]) -> None:
        """Note what owns the memory of a value, if that was made in the forward."""
        while True:
            is_early = tail.meta["phase"] == "forward" and tail.op == "call_function"
            if not _is_alias(tail):
                if is_early:
                    spec = self.plan.nodes[tail.name].outputs[result]
                    kept[tail.name, result] = (self._place(tail), self._bytes(tail, result, spec))
                return
            read = into[tail.name]
            if is_early and read.source != read.target:
                kept[tail.name, "copy"] = (self._place(tail), self._bytes(read.tail, read.result, read.target))
                return
            tail, result = read.tail, read.result

    def tokens(self) -> Iterator[Counted]:
        """Elements of the first integer input; none without such an input."""
        nodes = self.symbolic.program.nodes_by_name()
        for slot in self.symbolic.program.inputs_of(InputKind.INPUT):
            value = nodes[slot.node].meta["val"]
            if not value.dtype.is_floating_point and value.shape:
                yield None, product_of(self.symbolic.shapes[slot.node][0])
                return

    # Values.

    def reads(self) -> Iterator[Read]:
        """Every value that is read, in program order; results of the program last."""
        for node in self._calls():
            node_plan = self.plan.nodes[node.name]
            wanted = node_plan.outputs if node.target is hub else node_plan.inputs
            for index, (operand, target) in enumerate(zip(operands_of(node), wanted, strict=True)):
                yield Read(*self._made(operand), target, node, operand=index)
        owners = {(slot.kind, slot.name): slot.node for slot in self.symbolic.program.inputs}
        nodes = self.symbolic.program.nodes_by_name()
        for slot in self.symbolic.program.outputs:
            if slot.node in nodes:
                kind = OWNERS.get(slot.kind)
                owner = None if kind is None else nodes[owners[kind, slot.name]]
                target = self.plan.outputs[result_key(slot)]
                yield Read(*self._made(nodes[slot.node]), target, owner, result_key(slot))

    def _made(self, operand: fx.Node) -> tuple[fx.Node, int, PartitionSpec]:
        tail, result = resolve(operand)
        return tail, result, self.plan.nodes[tail.name].outputs[result]

    def _calls(self) -> Iterator[fx.Node]:
        for node in self.symbolic.program.graph.nodes:
            if node.op == "call_function" and node.name in self.plan.nodes:
                yield node

    def _place(self, node: fx.Node) -> BlockPlace | None:
        return self.symbolic.places.get(node.name)

    def _shape(self, node: fx.Node, result: int) -> Shape:
        return self.symbolic.shapes[node.name][result]

    def local_shape(self, shape: Shape, spec: PartitionSpec) -> Shape:
        """The padded shape on each rank."""
        return tuple(
            ceil_div(size, product_of([self.axes[axis] for axis in spec.axes_of(dim)])) if spec.axes_of(dim) else size
            for dim, size in enumerate(shape)
        )

    def _bytes(self, node: fx.Node, result: int, spec: PartitionSpec) -> Size:
        return product_of(self.local_shape(self._shape(node, result), spec)) * _value(node, result).dtype.itemsize


def ring_bytes(kind: ReshardKind, before: Size, after: Size, ranks: Size) -> Size:
    """Bytes that each of `ranks` sends with ring algorithms, of local bytes before and after.

    All-gather: (n - 1) * before; reduce-scatter: (n - 1) * after; all-reduce: 2 (n - 1) / n * before; all-to-all:
    (n - 1) / n * before (Thakur, Rabenseifner, Gropp 2005, section 4). Local steps send nothing.
    """
    others = ranks - 1
    match kind:
        case ReshardKind.ALL_GATHER:
            return others * before
        case ReshardKind.REDUCE_SCATTER:
            return others * after
        case ReshardKind.ALL_REDUCE:
            return 2 * others * before / sympy.sympify(ranks)
        case ReshardKind.ALL_TO_ALL:
            return others * before / sympy.sympify(ranks)
    return 0


_COLLECTIVES = {
    "_c10d_functional.all_gather_into_tensor.default": ReshardKind.ALL_GATHER,
    "_c10d_functional.reduce_scatter_tensor.default": ReshardKind.REDUCE_SCATTER,
    "_c10d_functional.all_reduce.default": ReshardKind.ALL_REDUCE,
    "_c10d_functional.all_to_all_single.default": ReshardKind.ALL_TO_ALL,
}
_GRADIENT = 1
"""Where an update takes its gradient; see `autoshard.kernels.optimizers`."""


def _is_alias(node: fx.Node) -> bool:
    return node.op == "call_function" and (node.target is hub or is_view(node))


def _payload(collective: fx.Node) -> Any:
    operand: Any = collective.args[0]
    return operand.meta["val"]


def _value(node: fx.Node, result: int) -> Any:
    return [value for value in tensor_values(node) if value is not None][result]
