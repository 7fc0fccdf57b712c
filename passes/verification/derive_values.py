"""Derives, for each value of a lowered program, the traced value and the spec that it represents.

The derivation is an induction over the traced program (translation validation: Pnueli, Siegel, Singerman 1998). It uses
neither the plan nor the metadata of the lowered program:

1. A placeholder holds the value of its slot, a constant the equal constant of the trace.
2. Suppose a value is held under a spec, and the lowered program makes a reshard step from that spec, exactly as
   `autoshard.ir.emit` defines it. Then the value is also held under the step's target spec.
3. Suppose the operands of a traced call are held under the specs of a strategy of the operator's rule. Suppose the
   lowered program makes the call's local form on them, exactly as `autoshard.rules.emit_local` defines it. Then the
   call's results are held under the strategy's specs.

Steps and local forms are recorded once for all equal calls (`local_forms`) and then looked up.

Several local values may hold one traced value under one spec, and a definition may read any of them. They are equal, or
addends of one sum, in which a strategy is linear. Specs are stored without axes of size one.
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
from passes.verification.local_forms import LocalForms, Numbers, Way, without_single_axes

Holders = dict[PartitionSpec, set[int]]
"""For each spec, the numbers of the local values that hold one traced value."""


@dataclass(slots=True)
class Derivation:
    """The state of a derivation.

    Args:
        program: the traced program, in the form that was lowered.
        lowered: the lowered program.
        forms: the local forms on its mesh.
        traced, local: value numbers of both programs.
        ranges: ranges of the traced values.
        holders: for each traced number, the local values that hold it.
        covered: the local numbers that are part of some proof.
        rules: operator to the number of traced calls that rest on its rule.
        unruled: the first node of each operator that ran whole on every rank for lack of a rule.
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
        """Derive everything that can be derived, starting from corresponding placeholders."""
        for number, node in enumerate(self.traced.nodes):
            if node.op == "placeholder":
                self._hold_placeholder(number)
            elif node.op == "get_attr":
                self._hold_constant(number)
            elif node.target is not operator.getitem:
                self._derive_call(number, node)

    def spec(self, spec: PartitionSpec) -> PartitionSpec:
        """The spec without axes of size one."""
        return without_single_axes(spec, self.mesh)

    def specs_of(self, local: int) -> list[tuple[fx.Node, PartitionSpec]]:
        """The traced values that a local number holds, with their specs."""
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
        """Record that `found` hold the traced value under `spec`, and derive further specs through reshards."""
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
        """Find the local forms of a traced call under every strategy whose operands are held."""
        found: list[fx.Node] = []
        fx.map_arg((node.args, node.kwargs), found.append)  # repeated where a value is used twice
        holders = [self.holders[self.traced.numbers[operand]] for operand in found]
        call = self.forms.of_call(node, self.ranges)
        ways = call.ways(tuple(map(frozenset, holders)))
        derived = [self._derive_way(number, node, way, holders) for way in ways]
        if any(derived) and call.rule is not None:
            self.rules[str(node.target)] += 1
        elif any(derived):
            self.unruled.setdefault(str(node.target), node)

    def _derive_way(self, number: int, node: fx.Node, way: Way, holders: list[Holders]) -> bool:
        """Whether the lowered program makes the call in this way. Its results are then recorded."""
        held = [frozenset(specs[spec]) for specs, spec in zip(holders, way.inputs, strict=True)]
        draw = self.traced.draw_of(number) if draws_numbers(node.target) else 0
        values = way.form.find(self.local, held, draw)
        if values is None:
            return False
        self.covered.update(*values[len(held) :])
        for index, (place, spec) in enumerate(zip(self._results(number, node), way.outputs, strict=True)):
            made = frozenset() if place is None else way.form.result(index, self.local, values)
            if place is not None and made:  # a result that is not selected is not used under this strategy
                self._hold(place, spec, made)
        return True

    def _results(self, number: int, node: fx.Node) -> list[int | None]:
        """The numbers of a call's results; None for a result that the trace does not read."""
        if isinstance(node.meta["val"], torch.Tensor):
            return [number]
        values = tensor_values(node)
        return [self.traced.selection(number, index) for index, value in enumerate(values) if value is not None]
