"""Derive what each value of a lowered program stands for: which traced value, under which spec.

The derivation is an induction over the traced program (translation validation: Pnueli, Siegel, Singerman 1998). It
knows neither the plan nor the metadata of the lowered program:

1. A placeholder holds what its slot promises, a constant the equal constant of the trace.
2. A value that is held under a spec is held under another one wherever the lowered program makes the step of a reshard
   that leads there, exactly as `autoshard.ir.emit` defines it.
3. If operands of a traced call are held under specs that a strategy of the operator's rule admits, and the lowered
   program makes the local form of the call on them, exactly as `autoshard.rules.emit_local` defines it, then that
   yields the call's results under the strategy's specs.

Several local values may hold one traced value under one spec; where a definition reads the value, any of them will do:
they are equal, or addends of one sum, in which a strategy is linear. Specs are kept without axes of size one.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autoshard.ir.emit import emit_reshard
from autoshard.ir.lowered import LoweredProgram
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import Program, tensor_values
from autoshard.ir.reshard import ReshardKind, ReshardStep
from autoshard.ir.spec import PartitionSpec, Reduction
from autoshard.ir.spec_graph import Move, moves_from, state_of
from autoshard.rules.emit_local import emit_local
from autoshard.rules.enumeration import Strategy, replicated
from autoshard.rules.notation import BoundRule
from autoshard.rules.registry import bound_rule
from passes.find_local import FindingTracer, NotFoundError, numbers_of
from passes.find_strategies import find_strategies
from passes.number_values import Numbering, call_key, draws_numbers, number_graph

Holders = dict[PartitionSpec, set[int]]
"""Under each spec the numbers of the local values that hold one traced value."""

_aten = torch.ops.aten

_OPENINGS = {
    ReshardKind.ALL_GATHER: {_aten.contiguous.default},
    ReshardKind.ALL_REDUCE: {_aten.contiguous.default},
    ReshardKind.ALL_TO_ALL: {_aten.contiguous.default, _aten.constant_pad_nd.default},
    ReshardKind.MAKE_PARTIAL: {_aten.where.ScalarOther},
    ReshardKind.REDUCE_SCATTER: {_aten.contiguous.default, _aten.constant_pad_nd.default},
    ReshardKind.SLICE: {_aten.narrow.default, _aten.constant_pad_nd.default},
}
"""The operators with which steps may begin: what no node does with a value need not be tried."""


@dataclass(slots=True)
class Derivation:
    """What has been derived.

    Args:
        program: the traced program, in the form that was lowered.
        lowered: the lowered program.
        traced, local: the numbers of their nodes.
        holders: for each traced number, who holds it.
        covered: the local numbers that are part of some proof.
        rules: how many traced calls rest on each operator's rule.
        unruled: the first node of each operator that ran whole on every rank for lack of a rule.
    """

    program: Program
    lowered: LoweredProgram
    traced: Numbering = field(init=False)
    local: Numbering = field(init=False)
    holders: defaultdict[int, Holders] = field(default_factory=lambda: defaultdict(dict))
    covered: set[int] = field(default_factory=set)
    rules: Counter[str] = field(default_factory=Counter)
    unruled: dict[str, fx.Node] = field(default_factory=dict)
    _strategies: dict[Any, Sequence[Strategy]] = field(default_factory=dict)
    _rules: dict[Any, BoundRule | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.traced = number_graph(self.program.graph_module)
        self.local = number_graph(self.lowered.graph_module)

    @property
    def mesh(self) -> Mesh:
        """The mesh of the lowered program."""
        return self.lowered.mesh

    def run(self) -> None:
        """Derive all that can be derived; placeholders of both programs are known to correspond."""
        for number, node in enumerate(self.traced.nodes):
            if node.op == "placeholder":
                self._hold_placeholder(number)
            elif node.op == "get_attr":
                self._hold_constant(number, node)
            elif node.target is not operator.getitem:
                self._derive_call(number, node)

    def spec(self, spec: PartitionSpec) -> PartitionSpec:
        """The spec without axes of size one, over which nothing is split and nothing to reduce."""
        if all(size > 1 for _, size in self.mesh.axes):
            return spec
        real = {axis for axis, size in self.mesh.axes if size > 1}
        dims = [tuple(axis for axis in dim if axis in real) for dim in spec.dims]
        return PartitionSpec(*dims, partial={axis: reduction for axis, reduction in spec.partial if axis in real})

    def specs_of(self, local: int) -> list[tuple[fx.Node, PartitionSpec]]:
        """The traced values that a local number holds."""
        return [
            (self.traced.nodes[number], spec)
            for number, holders in self.holders.items()
            for spec, numbers in holders.items()
            if local in numbers
        ]

    # What holds a value.

    def _hold_placeholder(self, number: int) -> None:
        key = self.traced.key_of(number)  # its position among the placeholders
        self._hold(number, self.lowered.inputs[key[1]].spec, {self.local.keys[key]})

    def _hold_constant(self, number: int, node: fx.Node) -> None:
        local = self.local.keys.get(self.traced.key_of(number))
        if local is not None:
            self._hold(number, PartitionSpec(), {local})

    def _hold(self, number: int, spec: PartitionSpec, found: set[int] | frozenset[int]) -> None:
        """`found` hold the traced value under `spec`; so do, under other specs, what reshards make of them."""
        self.covered |= found
        spec = self.spec(spec)
        fresh = set(found) - self.holders[number].get(spec, set())
        if not fresh:
            return
        self.holders[number].setdefault(spec, set()).update(fresh)
        value = self.traced.nodes[number].meta["val"]
        for after, reached in self._reshards(value, spec, fresh):
            self._hold(number, after, reached)

    # Reshards.

    def _reshards(
        self, value: torch.Tensor, spec: PartitionSpec, held: set[int]
    ) -> Iterator[tuple[PartitionSpec, frozenset[int]]]:
        """What one step away from `spec` the lowered program makes of the local values `held`."""
        used_by = {self.local.nodes[user].target for number in held for user in self.local.users[number]}
        is_empty = value.numel() == 0
        if not is_empty and not any(used_by & openings for openings in _OPENINGS.values()):
            return
        reductions = (Reduction.SUM,) if value.is_complex() else tuple(Reduction)
        for move, (stacks, partial) in moves_from(state_of(spec, value.dim()), self.mesh, reductions):
            if self.mesh.axis_size(move.axis) == 1 or not (is_empty or used_by & _OPENINGS[move.kind]):
                continue
            after = PartitionSpec(*stacks, partial=dict(partial))
            for reached in self._step(value, self._reshard_step(move, spec, after), held):
                yield after, reached

    def _reshard_step(self, move: Move, source: PartitionSpec, target: PartitionSpec) -> ReshardStep:
        size = self.mesh.axis_size(move.axis)
        return ReshardStep(move.kind, move.axis, size, move.dim, move.to_dim, move.reduction, source, target, 0, 0)

    def _step(self, value: torch.Tensor, step: ReshardStep, held: set[int]) -> Iterator[frozenset[int]]:
        """The values that `step` leads to: as the last of a reshard, and as one that others follow."""
        tries: list[tuple[ReshardStep, ...]] = [(step,)]
        if step.kind is ReshardKind.SLICE:
            back = Move(ReshardKind.ALL_GATHER, step.axis, dim=step.to_dim)
            tries.append((step, self._reshard_step(back, step.target, step.source)))
        for steps in tries:
            yield from self._first_step(value, steps, held)

    def _first_step(
        self, value: torch.Tensor, steps: Sequence[ReshardStep], held: set[int]
    ) -> Iterator[frozenset[int]]:
        tracer = FindingTracer(self.local)
        reached: list[frozenset[int]] = []

        def on_node(node: fx.Node, spec: PartitionSpec | None) -> None:
            if spec is not None and not reached:
                reached.append(numbers_of(node))
                self.covered |= tracer.touched

        with suppress(NotFoundError):  # what was reached by then is what counts
            emit_reshard(
                tracer.proxy_of(held), steps, tuple(value.shape), self.mesh, dtype=value.dtype, on_node=on_node
            )
        yield from reached

    # Calls.

    def _derive_call(self, number: int, node: fx.Node) -> None:
        """Find the local forms of a traced call under every strategy whose operands are held."""
        operands = self._operands(node)
        rule = self._rule(node)
        derived = False
        for strategy in self._held_strategies(node, rule, operands):
            derived |= self._find_form(number, node, rule, strategy, operands)
        if derived and rule is not None:
            self.rules[str(node.target)] += 1
        elif derived:
            self.unruled.setdefault(str(node.target), node)

    def _operands(self, node: fx.Node) -> list[int]:
        """The numbers of the tensor operands, in order, repeated where a value is used twice."""
        found: list[fx.Node] = []
        fx.map_arg((node.args, node.kwargs), found.append)
        return [self.traced.numbers[item] for item in found]

    def _rule(self, node: fx.Node) -> BoundRule | None:
        key = self._call_key(node)
        if key not in self._rules:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
            self._rules[key] = bound_rule(node.target, args, kwargs, tensor_values(node))
        return self._rules[key]

    def _call_key(self, node: fx.Node) -> Any:
        """What the rule of a call depends on: literals, and the form of its operands."""

        def form(operand: fx.Node) -> Any:
            value = operand.meta["val"]
            return tuple(value.shape), value.stride(), value.dtype

        return call_key(node.op, node.target, node.args, node.kwargs, form)

    def _held_strategies(self, node: fx.Node, rule: BoundRule | None, operands: Sequence[int]) -> Sequence[Strategy]:
        """The strategies of a call under which all its operands are held."""
        if rule is None:
            results = sum(value is not None for value in tensor_values(node))
            return [replicated(len(operands), results, self.mesh)]
        held = tuple(frozenset(self.holders[operand]) for operand in operands)
        key = (self._call_key(node), held)
        if key not in self._strategies:
            self._strategies[key] = [
                strategy
                for strategy in find_strategies(rule, self.mesh, held)
                if all(self.spec(spec) in specs for spec, specs in zip(strategy.inputs, held, strict=True))
            ]
        return self._strategies[key]

    def _find_form(
        self, number: int, node: fx.Node, rule: BoundRule | None, strategy: Strategy, operands: Sequence[int]
    ) -> bool:
        """Whether the lowered program makes the call under `strategy`; what it yields is then held."""
        tracer = FindingTracer(self.local, self.traced.draw_of(number) if draws_numbers(node.target) else 0)
        sources = [
            self.holders[operand].get(self.spec(spec), set())
            for operand, spec in zip(operands, strategy.inputs, strict=True)
        ]
        if not all(sources):
            return False
        proxies: Iterator[Any] = iter([tracer.proxy_of(source) for source in sources])
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda _: next(proxies))
        shapes = [tuple(value.shape) for value in tensor_values(node) if value is not None]
        try:
            result = emit_local(node.target, args, kwargs, rule, strategy, self.mesh, shapes, tracer=tracer)
        except NotFoundError:
            return False
        self.covered |= tracer.touched
        self._hold_results(number, node, strategy, result, tracer)
        return True

    def _hold_results(self, number: int, node: fx.Node, strategy: Strategy, result: Any, tracer: FindingTracer) -> None:
        if isinstance(node.meta["val"], torch.Tensor):
            self._hold(number, strategy.outputs[0], numbers_of(result))
            return
        present = [index for index, value in enumerate(tensor_values(node)) if value is not None]
        for spec, index in zip(strategy.outputs, present, strict=True):
            selected = self.traced.selection(number, index)
            if selected is None:
                continue
            try:
                held = numbers_of(result[index])
            except NotFoundError:
                continue  # this result is not used under this strategy
            self._hold(selected, spec, held)
