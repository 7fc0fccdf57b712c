"""Derive what each value of a lowered program stands for: which traced value, under which spec.

The derivation is an induction over the traced program (translation validation: Pnueli, Siegel, Singerman 1998). It
knows neither the plan nor the metadata of the lowered program:

1. A placeholder holds what its slot promises, a constant the equal constant of the trace.
2. A value that is held under a spec is held under another one wherever the lowered program makes the step of a reshard
   that leads there, exactly as `autoshard.ir.emit` defines it.
3. If operands of a traced call are held under specs that a strategy of the operator's rule admits, and the lowered
   program makes the local form of the call on them, exactly as `autoshard.rules.emit_local` defines it, then that
   yields the call's results under the strategy's specs.

What steps and local forms are is written down once for all that are alike (`local_forms`) and then looked up.

Several local values may hold one traced value under one spec; where a definition reads the value, any of them will do:
they are equal, or addends of one sum, in which a strategy is linear. Specs are kept without axes of size one.
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
"""Under each spec the numbers of the local values that hold one traced value."""


@dataclass(slots=True)
class Derivation:
    """What has been derived.

    Args:
        program: the traced program, in the form that was lowered.
        lowered: the lowered program.
        forms: the local forms on its mesh.
        traced, local: the numbers of their nodes.
        ranges: what numbers the traced values can be.
        holders: for each traced number, who holds it.
        covered: the local numbers that are part of some proof.
        rules: how many traced calls rest on each operator's rule.
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
        """Derive all that can be derived; placeholders of both programs are known to correspond."""
        for number, node in enumerate(self.traced.nodes):
            if node.op == "placeholder":
                self._hold_placeholder(number)
            elif node.op == "get_attr":
                self._hold_constant(number)
            elif node.target is not operator.getitem:
                self._derive_call(number, node)

    def spec(self, spec: PartitionSpec) -> PartitionSpec:
        """The spec as values are held under it, without axes of size one."""
        return without_single_axes(spec, self.mesh)

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
        self._hold(number, self.spec(self.lowered.inputs[key[1]].spec), frozenset({self.local.keys[key]}))

    def _hold_constant(self, number: int) -> None:
        local = self.local.keys.get(self.traced.key_of(number))
        if local is not None:
            self._hold(number, PartitionSpec(), frozenset({local}))

    def _hold(self, number: int, spec: PartitionSpec, found: Numbers) -> None:
        """`found` hold the traced value under `spec`; so do, under other specs, what reshards make of them."""
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
        """Whether the lowered program makes the call in this way; what it yields is then held."""
        held = [frozenset(specs[spec]) for specs, spec in zip(holders, way.inputs, strict=True)]
        draw = self.traced.draw_of(number) if draws_numbers(node.target) else 0
        values = way.form.find(self.local, held, draw)
        if values is None:
            return False
        self.covered.update(*values[len(held) :])
        for index, (place, spec) in enumerate(zip(self._results(number, node), way.outputs, strict=True)):
            made = frozenset() if place is None else way.form.result(index, self.local, values)
            if place is not None and made:  # what is not selected is not used under this strategy
                self._hold(place, spec, made)
        return True

    def _results(self, number: int, node: fx.Node) -> list[int | None]:
        """The numbers of a call's results; None for one that nothing in the trace reads."""
        if isinstance(node.meta["val"], torch.Tensor):
            return [number]
        values = tensor_values(node)
        return [self.traced.selection(number, index) for index, value in enumerate(values) if value is not None]
