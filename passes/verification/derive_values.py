"""Derives, for each value of a lowered program, the traced value that it holds, and under which spec.

A local value *holds* a traced value under a spec if it is the rank's piece of the traced value under this spec.

The derivation is an induction over the traced program (translation validation: Pnueli, Siegel, Singerman 1998). It uses
neither the plan nor the metadata of the lowered program:

1. A placeholder holds the value of its slot. A constant holds the equal constant of the traced program.
2. Suppose a value is held under a spec, and the lowered program makes a reshard step from this spec, exactly as
   `autoshard.ir.emit` defines the step. Then the value is also held under the step's target spec.
3. Suppose the operands of a traced call are held under the specs of a strategy of the operator's rule. Suppose the
   lowered program makes the calls on them that `autoshard.rules.emit_local` defines for this strategy. Then the results
   of the traced call are held under the strategy's specs.

The *definition* of a reshard step or strategy is the list of calls that `emit` or `emit_local` makes for it. The calls
are recorded once as a `LocalForm`, and then looked up in the lowered program.

Several local values may hold one traced value under one spec, and a definition may read any of these local values.
They are equal, or they are addends of one sum in which the strategy is linear. Specs are stored without axes of size
one.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import torch
from torch import fx

from autoshard.ir.lowered import LoweredProgram
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import Program, tensor_values
from autoshard.ir.spec import PartitionSpec
from autoshard.rules.ranges import Ranges, find_ranges
from passes.preparation.number_values import Numbering, draws_numbers, number_graph
from passes.verification.local_forms import LocalForms, Numbers, StrategyForm, without_single_axes

Holders = dict[PartitionSpec, set[int]]
"""Local values that hold a traced value, as value numbers, by the spec under which they hold it."""


@dataclass(slots=True)
class Derivation:
    """Derives the values of a lowered program. Values are named by value numbers (`passes.preparation.number_values`).

    Args:
        program: the traced program, in the form that was lowered.
        forms: the local forms on the mesh of the lowered program.
        traced: the value numbers of the traced program.
        local: the value numbers of the lowered program.
        ranges: range of each traced value (`find_ranges`).
        holders: for each traced value, the local values that hold it, by spec.
        covered: the local values that are part of some proof.
        rules: for each operator, the number of traced calls that were derived by its sharding rule.
        unruled: for each operator without a rule, the first traced call that every rank runs whole.
    """

    program: Program
    lowered: LoweredProgram
    forms: LocalForms
    traced: Numbering = field(init=False)
    local: Numbering = field(init=False)
    ranges: Ranges = field(init=False)
    holders: defaultdict[int, Holders] = field(default_factory=lambda: defaultdict(dict))
    covered: set[int] = field(default_factory=set)
    rules: Counter[str] = field(default_factory=Counter)
    unruled: dict[str, fx.Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.traced = number_graph(self.program.graph_module)
        self.local = number_graph(self.lowered.graph_module)
        self.ranges = find_ranges(self.program.graph_module)

    @property
    def mesh(self) -> Mesh:
        """The mesh of the lowered program."""
        return self.lowered.mesh

    def run(self) -> None:
        """Fill `holders`: derive the values that each call of the traced program gives, in the order of the program."""
        for number, node in enumerate(self.traced.nodes):
            if node.op == "placeholder":
                self._hold_placeholder(number)
            elif node.op == "get_attr":
                self._hold_constant(number)
            elif node.target is not operator.getitem:
                self._derive_call(number, node)

    def spec(self, spec: PartitionSpec) -> PartitionSpec:
        """Return the spec without axes of size one."""
        return without_single_axes(spec, self.mesh)

    def specs_of(self, local: int) -> list[tuple[fx.Node, PartitionSpec]]:
        """Return the traced nodes that the local value with number `local` holds, each with the spec."""
        return [
            (self.traced.nodes[number], spec)
            for number, holders in self.holders.items()
            for spec, numbers in holders.items()
            if local in numbers
        ]

    # Local values that hold traced values.

    def _hold_placeholder(self, number: int) -> None:
        key = self.traced.key_of(number)  # its position among the placeholders
        self._hold(number, self.spec(self.lowered.inputs[key[1]].spec), frozenset({self.local.keys[key]}))

    def _hold_constant(self, number: int) -> None:
        local = self.local.keys.get(self.traced.key_of(number))
        if local is not None:
            self._hold(number, PartitionSpec(), frozenset({local}))

    def _hold(self, number: int, spec: PartitionSpec, found: Numbers) -> None:
        """Record that the local values `found` hold traced value `number` under `spec`.

        Values that the lowered program makes from `found` by reshards are recorded too.
        """
        self.covered |= found
        known = self.holders[number].setdefault(spec, set())
        fresh = found - known
        if not fresh:
            return
        known |= fresh
        value = self.traced.nodes[number].meta["val"]
        readers = dict.fromkeys(self.local.nodes[user].target for held in fresh for user in self.local.users[held])
        for after, form in self.forms.of_reshards(value, spec, readers):
            values = form.find(self.local, [fresh])
            if values is not None:
                self.covered.update(*values)
                self._hold(number, after, form.result(0, self.local, values))

    # Calls.

    def _derive_call(self, number: int, node: fx.Node) -> None:
        """Record the local values that hold a traced call's results.

        A strategy of the call counts if local values hold its operands, and if the lowered program makes its calls.
        """
        found: list[fx.Node] = []
        fx.map_arg((node.args, node.kwargs), found.append)  # repeated where a value is used twice
        holders = [self.holders[self.traced.numbers[operand]] for operand in found]
        call = self.forms.of_call(node, self.ranges)
        strategies = call.of_held(tuple(map(frozenset, holders)))
        derived = [self._derive_strategy(number, node, strategy, holders) for strategy in strategies]
        if any(derived) and call.rule is not None:
            self.rules[str(node.target)] += 1
        elif any(derived):
            self.unruled.setdefault(str(node.target), node)

    def _derive_strategy(self, number: int, node: fx.Node, strategy: StrategyForm, holders: list[Holders]) -> bool:
        """Record the results of a traced call under one strategy, and return True.

        If the lowered program does not make the calls of the strategy, nothing is recorded, and False is returned.
        `holders` has the local values that hold each operand.
        """
        held = [frozenset(specs[spec]) for specs, spec in zip(holders, strategy.inputs, strict=True)]
        draw = self.traced.draw_of(number) if draws_numbers(node.target) else 0
        values = strategy.form.find(self.local, held, draw)
        if values is None:
            return False
        self.covered.update(*values[len(held) :])
        for index, (place, spec) in enumerate(zip(self._results(number, node), strategy.outputs, strict=True)):
            made = frozenset() if place is None else strategy.form.result(index, self.local, values)
            if place is not None and made:  # a result that is not selected is not used under this strategy
                self._hold(place, spec, made)
        return True

    def _results(self, number: int, node: fx.Node) -> list[int | None]:
        """Return the value number of each tensor result of a traced call, or None for a result that nothing reads."""
        if isinstance(node.meta["val"], torch.Tensor):
            return [number]
        values = tensor_values(node)
        return [self.traced.selection(number, index) for index, value in enumerate(values) if value is not None]
