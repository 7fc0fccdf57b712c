"""Recompute values of the forward in the backward, or fetch them from the host, instead of keeping them.

Before → after: for each node `y = f(x)` to recompute, a clone `y_again = f(x)` is inserted in the backward, just before
the node that the plan names. All readers of `y` outside the forward then read `y_again`. A clone reads its operands'
clones where there are any, and otherwise the values that the forward keeps. The forward then no longer saves `y`,
because no call of the backward reads `y`. Clones have the phase "recompute", which runs within the backward.

For each node `y` to offload, `y_host = to_host(y)` is inserted after it in the forward. `y_back = from_host(y_host)` is
inserted just before the node that the plan names. All readers of `y` outside the forward, clones among them, then read
`y_back`. The forward keeps `y_host`, which takes no memory of the device.

A clone equals its original, because nodes are pure and random operators are indexed by a counter. The verifier
(`verify_preparation`) checks that a node and its clone or copy have the same value number.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from autoshard.errors import PlanMismatchError
from autoshard.graphs.copy_nodes import copy_node
from autoshard.ir.offload import OffloadedNode
from autoshard.ir.program import Program
from autoshard.ir.recompute import PHASE, RecomputedNode
from autoshard.kernels.offload import from_host, to_host
from passes.preparation.rewriting import copy_program, insert_call

_ORIGINAL = "recomputes"
_MOVED = "moves"


def original_of(node: fx.Node) -> str | None:
    """Return the name of the node that a clone recomputes, or None if the node is no clone."""
    return node.meta.get(_ORIGINAL)


def moved_by(node: fx.Node) -> str | None:
    """Return the name of the node whose value a copy to or from the host moves, or None if the node is no such copy."""
    return node.meta.get(_MOVED)


@dataclass(frozen=True, slots=True)
class InsertRecompute:
    """Insert clones that recompute values, and copies to and from the host (before → after in the module's docstring).

    Args:
        nodes: the nodes to recompute, each with the node before which its clone is inserted.
        offloaded: the nodes to offload, each with the node before which it is fetched.
    """

    nodes: tuple[RecomputedNode, ...]
    offloaded: tuple[OffloadedNode, ...] = ()

    def __call__(self, program: Program) -> Program:
        """Return the program with clones, and with copies to and from the host.

        Raises:
            PlanMismatchError: the program lacks a node, or a restored value is read before it is restored.
        """
        if not self.nodes and not self.offloaded:
            return program
        program = copy_program(program)
        named = {node.name: node for node in program.graph.nodes}
        by_anchor: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for item in (*self.nodes, *self.offloaded):
            by_anchor[_find(named, item.before)].append(_find(named, item.name))
        _RecomputeInsertion(program.graph, by_anchor, {named[item.name] for item in self.offloaded}).run()
        program.graph_module.recompile()
        return program


def _find(named: Mapping[str, fx.Node], name: str) -> fx.Node:
    if name not in named or named[name].op != "call_function":
        raise PlanMismatchError(
            f"the plan's recomputation names node {name!r}, which this program does not compute. The plan is for "
            "another model or other inputs. Plan again, or load this model's plan."
        )
    return named[name]


@dataclass(slots=True)
class _RecomputeInsertion:
    """The insertion of clones and copies into a graph.

    Args:
        by_anchor: for each node before which values are restored, the nodes of these values.
        order: index of each node in the graph before the change.
        waiting: nodes that are not restored yet.
        restored: for each restored node, its clone or its copy from the host.
        copies: the copies on the host.
    """

    graph: fx.Graph
    by_anchor: Mapping[fx.Node, list[fx.Node]]
    offloaded: Collection[fx.Node]
    order: dict[fx.Node, int] = field(init=False)
    waiting: set[fx.Node] = field(init=False)
    restored: dict[fx.Node, fx.Node] = field(default_factory=dict)
    copies: list[fx.Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.order = {node: index for index, node in enumerate(self.graph.nodes)}
        self.waiting = {value for nodes in self.by_anchor.values() for node in nodes for value in _values_of(node)}

    def run(self) -> None:
        for anchor in sorted(self.by_anchor, key=self.order.__getitem__):
            originals: list[fx.Node] = []
            for node in sorted(self.by_anchor[anchor], key=self.order.__getitem__):
                make = self._fetch if node in self.offloaded else self._clone
                for original in _values_of(node):
                    make(original, anchor)
                    originals.append(original)
            for original in originals:
                self._read_restored(original, anchor)
        for node in (*reversed(self.restored.values()), *self.copies):
            if not node.users:
                self.graph.erase_node(node)

    def _clone(self, original: fx.Node, anchor: fx.Node) -> None:
        early = self.waiting.intersection(original.all_input_nodes)
        if early:
            raise PlanMismatchError(
                f"the plan recomputes {original.name!r} before its operand {min(map(str, early))!r}. Plan again."
            )
        with self.graph.inserting_before(anchor):
            clone = copy_node(self.graph, original, lambda operand: self.restored.get(operand, operand))
        clone._rename(f"{original.name}_again")
        clone.meta = {**original.meta, "phase": PHASE, _ORIGINAL: original.name}
        self._is_there(original, clone)

    def _fetch(self, original: fx.Node, anchor: fx.Node) -> None:
        """Insert a copy of a value to the host right after it is made, and a copy back before `anchor`.

        A tuple is not copied, because its items are copied one by one.
        """
        if not isinstance(original.meta.get("val"), torch.Tensor):
            self.waiting.remove(original)
            return
        with self.graph.inserting_after(original):
            copy = insert_call(self.graph, to_host, (original,), like=original, name=f"{original.name}_host")
        with self.graph.inserting_before(anchor):
            back = insert_call(self.graph, from_host, (copy,), like=original, name=f"{original.name}_back")
        back.meta["phase"] = PHASE
        copy.meta[_MOVED] = back.meta[_MOVED] = original.name
        self.copies.append(copy)
        self._is_there(original, back)

    def _is_there(self, original: fx.Node, restored: fx.Node) -> None:
        self.restored[original] = restored
        self.waiting.remove(original)

    def _read_restored(self, original: fx.Node, anchor: fx.Node) -> None:
        """Make the readers of `original` outside the forward read the restored value.

        Raises:
            PlanMismatchError: a reader comes before `anchor`, the node before which the value is restored.
        """
        if original not in self.restored:
            return
        for reader in list(original.users):
            if reader.op == "output" or reader.meta["phase"] in ("forward", PHASE) or reader in self.restored:
                continue
            if self.order[reader] < self.order[anchor]:
                raise PlanMismatchError(
                    f"the plan recomputes or fetches {original.name!r} before {anchor.name!r}, but {reader.name!r} "
                    "reads it earlier. Plan again."
                )
            reader.replace_input_with(original, self.restored[original])


def _values_of(node: fx.Node) -> tuple[fx.Node, ...]:
    return node, *(user for user in node.users if user.target is operator.getitem)
