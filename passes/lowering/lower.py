"""Lowers a planned program to the program that each rank runs, with local shapes and explicit collectives.

For each call of the traced program, the pass first reshards the operands to the specs of the call's strategy. It then
emits the calls on local tensors that compute the call under this strategy. For example, `mm(x, w)` with a split inner
dim becomes a local `mm`. A reader that needs the whole result gets it through an all-reduce. Fan-outs are left out.

Results of the program are resharded to their final specs as soon as they are computed. So no full gradient is kept
after its reduction.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from autoshard.errors import NotAvailableError, PlanMismatchError
from autoshard.graphs.lazy_module import lazy_module
from autoshard.ir.emit import emit_reshard
from autoshard.ir.lowered import LocalSlot, LoweredProgram
from autoshard.ir.plan import Plan
from autoshard.ir.plan_parts import NodePlan
from autoshard.ir.program import InputKind, InputSlot, OutputSlot, Program, tensor_values
from autoshard.ir.reshard import ReshardStep, StepCost, plan_reshard
from autoshard.ir.spec import PartitionSpec
from autoshard.rules.emit_local import emit_local
from autoshard.rules.fan_out import fan_out
from passes.lowering.bound_rules import BoundRules
from passes.strategies.enumerate_strategies import operands_of, resolve
from passes.strategies.local_tracer import LocalTracer


@dataclass(frozen=True, slots=True)
class Lower:
    """Lowers a program by a plan.

    Args:
        step_cost: price of a reshard step, by which each reshard gets its cheapest steps. None: the price is the bytes
            sent.
        steps: a cache of the steps of each reshard, by reader, maker and specs. Lowering uses its entries, and adds
            missing entries. With one cache, a plan that is lowered at several sizes takes the same steps at each size.
    """

    plan: Plan
    step_cost: StepCost | None = None
    steps: dict[object, tuple[ReshardStep, ...]] | None = None

    def __call__(self, program: Program) -> LoweredProgram:
        """Return the lowered program.

        Raises:
            PlanMismatchError: the plan is for another program, or contradicts itself.
        """
        check_digest(self.plan, program)
        _check_nodes(self.plan, program)
        _check_parameters(self.plan, program)
        return _Lowering(program, self.plan, self.step_cost, {} if self.steps is None else self.steps).run()


def check_digest(plan: Plan, program: Program) -> None:
    """Raise `PlanMismatchError` if a plan was made for a program with another digest than `program`."""
    digest = program.digest()
    if digest != plan.program_digest:
        raise PlanMismatchError(
            "The plan is for another model or other inputs, loss or optimizer. The plan's program is "
            f"{plan.program_digest} with inputs {dict(plan.inputs)}; the program of this call is {digest}. Plan again "
            "with the arguments of this call, or load a plan that was made with them."
        )


def _check_nodes(plan: Plan, program: Program) -> None:
    """Raise `PlanMismatchError` unless the plan has one spec for each operand and result of each node."""
    for node in program.graph.nodes:
        known = plan.nodes.get(node.name)
        operands, results = len(operands_of(node)), sum(value is not None for value in tensor_values(node))
        if known is not None and (len(known.inputs), len(known.outputs)) != (operands, results):
            raise PlanMismatchError(
                f"the plan has {len(known.inputs)} specs for operands of node {node.name!r} and {len(known.outputs)} "
                f"for results, and it has {operands} and {results}: the plan was changed. Plan again."
            )


def _check_parameters(plan: Plan, program: Program) -> None:
    """Raise `PlanMismatchError` if a plan gives a parameter two different specs.

    A plan has the spec of a parameter in `parameters` and in `nodes`. Lowering uses the second.
    """
    for slot in program.inputs_of(InputKind.PARAMETER):
        named, node = plan.parameters.get(slot.name), plan.nodes.get(slot.node)
        if named is not None and node is not None and named.spec != node.outputs[0]:
            raise PlanMismatchError(
                f"the plan has parameter {slot.name!r} as {named.spec!r} under 'parameters', and as "
                f"{node.outputs[0]!r} under 'nodes', {slot.node!r}. Give both the same spec (and its gradient and "
                "update, under 'outputs'), or plan again."
            )


_STRIDED = (torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_scatter.default)
"""Operators whose value depends on the strides of their operand."""


def result_key(slot: OutputSlot) -> str:
    """Return the key of an output of the program in `Plan.outputs`, such as "gradient wte.weight"."""
    return f"{slot.kind.value} {slot.name}"


@dataclass(slots=True)
class _Lowering:
    program: Program
    plan: Plan
    step_cost: StepCost | None
    known_steps: dict[object, tuple[ReshardStep, ...]]
    graph: fx.Graph = field(default_factory=fx.Graph)
    tracer: LocalTracer = field(init=False)
    local: dict[tuple[str, int], tuple[fx.Proxy, PartitionSpec]] = field(default_factory=dict)
    results: dict[int, fx.Node] = field(default_factory=dict)
    nodes: dict[str, fx.Node] = field(init=False)
    rules: BoundRules = field(init=False)

    def __post_init__(self) -> None:
        self.tracer = LocalTracer(self.graph)
        self.nodes = self.program.nodes_by_name()
        self.rules = BoundRules.of(self.program)

    def run(self) -> LoweredProgram:
        pending = self._results_by_node()
        constants = torch.nn.Module()
        for node in self.program.graph.nodes:
            if node.op == "output":
                break
            self.tracer.like = node
            self._lower(node, constants)
            for index in pending[node.name]:
                self._emit_result(index)
        self.tracer.like = None
        self.graph.output(tuple(self.results[index] for index in range(len(self.program.outputs))))
        module = lazy_module(constants, self.graph)
        return LoweredProgram(
            self.program,
            self.plan.mesh,
            module,
            self._slots(self.program.inputs),
            self._slots(self.program.outputs),
        )

    def _results_by_node(self) -> dict[str, list[int]]:
        pending: dict[str, list[int]] = defaultdict(list)
        for index, slot in enumerate(self.program.outputs):
            pending[slot.node].append(index)
        return pending

    def _lower(self, node: fx.Node, constants: torch.nn.Module) -> None:
        if node.op == "placeholder":
            self._keep(node, 0, self._placeholder(node), self._node_plan(node).outputs[0])
        elif node.op == "get_attr":
            setattr(constants, str(node.target), getattr(self.program.graph_module, str(node.target)))
            self._keep(node, 0, self.tracer.constant(str(node.target), node.meta["val"]), PartitionSpec())
        elif node.target is fan_out:
            spec = self._node_plan(node).outputs[0]
            self._keep(node, 0, self._operand(node.args[0], spec), spec)
        elif node.target is not operator.getitem:
            self._lower_call(node)

    def _placeholder(self, node: fx.Node) -> fx.Proxy:
        value, spec = node.meta["val"], self._node_plan(node).outputs[0]
        return self.tracer.placeholder(node.name, value, spec.local_shape(value.shape, self.plan.mesh))

    def _lower_call(self, node: fx.Node) -> None:
        rule, node_plan = self.rules.of_call(node), self._node_plan(node)
        strategy = self.rules.strategy(node, self.plan.mesh, node_plan)
        specs = iter(strategy.inputs)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: self._argument(argument, specs))
        if node.target in _STRIDED:
            _check_strides(node, args[0])
        result = emit_local(node.target, args, kwargs, rule, strategy, self.plan.mesh, tracer=self.tracer)
        if isinstance(node.meta.get("val"), torch.Tensor):
            self._keep(node, 0, result, strategy.outputs[0])
            return
        present = [index for index, value in enumerate(tensor_values(node)) if value is not None]
        for position, index in enumerate(present):
            if self._is_used(node, index):
                self._keep(node, position, result[index], strategy.outputs[position])

    def _is_used(self, node: fx.Node, index: int) -> bool:
        return any(user.target is operator.getitem and user.args[1] == index for user in node.users)

    def _argument(self, argument: fx.Node, specs: Any) -> Any:
        if not isinstance(argument.meta.get("val"), torch.Tensor):
            return self.local[argument.name, 0][0]
        return self._operand(argument, next(specs))

    def _operand(self, node: Any, target: PartitionSpec) -> fx.Proxy:
        """Return the local value of a traced node in spec `target`, after a reshard if the value has another spec."""
        source_node, result = resolve(node)
        proxy, source = self.local[source_node.name, result]
        value = node.meta["val"]
        steps = self._steps(source_node.name, result, source, target, value)
        if not steps:
            return proxy
        self.tracer.moving = source_node
        moved = emit_reshard(proxy, steps, tuple(value.shape), self.plan.mesh, dtype=value.dtype, on_node=_note_spec)
        self.tracer.moving = None
        return moved

    def _steps(
        self, maker: str, result: int, source: PartitionSpec, target: PartitionSpec, value: torch.Tensor
    ) -> tuple[ReshardStep, ...]:
        reader, mesh = self.tracer.like, self.plan.mesh
        place = (None if reader is None else reader.name, maker, result, source, target)
        if place in self.known_steps:
            return tuple(replace(step, axis_size=mesh.axis_size(step.axis)) for step in self.known_steps[place])
        size, shape = value.dtype.itemsize, tuple(value.shape)
        self.known_steps[place] = plan_reshard(source, target, shape, mesh, itemsize=size, cost=self.step_cost)
        return self.known_steps[place]

    def _emit_result(self, index: int) -> None:
        slot = self.program.outputs[index]
        node = self.nodes[slot.node]
        self.results[index] = self._operand(node, self._slot_spec(slot)).node

    def _keep(self, node: fx.Node, result: int, proxy: fx.Proxy, spec: PartitionSpec) -> None:
        proxy.node.meta.setdefault("spec", spec)
        self.local[node.name, result] = (proxy, spec)

    def _node_plan(self, node: fx.Node) -> NodePlan:
        found = self.plan.nodes.get(node.name)
        if found is None:
            raise PlanMismatchError(f"the plan has no node {node.name!r}: something was taken out of it. Plan again.")
        return found

    def _slots(self, slots: tuple[InputSlot, ...] | tuple[OutputSlot, ...]) -> tuple[LocalSlot, ...]:
        return tuple(LocalSlot(slot, self._slot_spec(slot), *self._shape_and_dtype(slot)) for slot in slots)

    def _slot_spec(self, slot: InputSlot | OutputSlot) -> PartitionSpec:
        if isinstance(slot, InputSlot):
            return self._node_plan(self.nodes[slot.node]).outputs[0]
        if result_key(slot) not in self.plan.outputs:
            raise PlanMismatchError(f"the plan has no output {result_key(slot)!r}: it was taken out of it. Plan again.")
        return self.plan.outputs[result_key(slot)]

    def _shape_and_dtype(self, slot: InputSlot | OutputSlot) -> tuple[tuple[int, ...], torch.dtype]:
        value = self.nodes[slot.node].meta["val"]
        return tuple(value.shape), value.dtype


def _check_strides(node: fx.Node, operand: Any) -> None:
    """Raise `NotAvailableError` if a call reads memory by strides, and its local operand has other strides."""
    traced, local = node.all_input_nodes[0].meta["val"].stride(), operand.node.meta["val"].stride()
    if traced != local:
        raise NotAvailableError(
            f"{node.target}, from {node.meta.get('source') or 'an unknown line'}, reads memory by strides, and "
            f"its operand has strides {local} on each device where the model has {traced}. Write it with "
            "view, unfold or slicing, or constrain its operand to stay whole."
        )


def _note_spec(node: fx.Node, spec: PartitionSpec | None) -> None:
    if spec is not None:
        node.meta["spec"] = spec
