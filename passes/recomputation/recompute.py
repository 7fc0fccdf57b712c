"""Compute values of the forward again in the backward, or fetch them from the host, instead of keeping them.

Before → after: for each node `y = f(x)` that is to be recomputed, `y_again = f(x)` is inserted in the backward, just
before the node that the plan names, and all that reads `y` outside the forward reads `y_again`. Operands of a clone are
clones where these are recomputed too, and else the values that the forward keeps. The forward then keeps `y` no longer:
phases are cut by who reads what. Clones carry phase "recompute", which runs within the backward.

For each node `y` that is offloaded, `y_host = to_host(y)` is inserted behind it in the forward, and `y_back =
from_host(y_host)` just before the node that the plan names; all that reads `y` outside the forward, clones among it,
reads `y_back`. The forward then keeps `y_host`, which takes no memory of the device.

A clone is equal to its original because nodes are pure and random operators are indexed by a counter, and so is what
comes back from the host; the verifier (`verify_preparation`) numbers both alike, or refuses.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from autoshard.errors import PlanMismatchError
from autoshard.ir.offload import OffloadedNode
from autoshard.ir.program import Program
from autoshard.ir.recompute import PHASE, RecomputedNode
from autoshard.kernels.offload import from_host, to_host
from autoshard.tracing.copy_node import copy_node
from passes.preparation.rewriting import copy_program, insert_call

_ORIGINAL = "recomputes"
_MOVED = "moves"


def original_of(node: fx.Node) -> str | None:
    """The name of the node that a clone computes again; None for what is no clone."""
    return node.meta.get(_ORIGINAL)


def moved_by(node: fx.Node) -> str | None:
    """The name of the node whose value a copy to or from the host moves; None for what is no such copy."""
    return node.meta.get(_MOVED)


@dataclass(frozen=True, slots=True)
class InsertRecompute:
    """See the module's docstring.

    Args:
        nodes: what to recompute, and where.
        offloaded: what to offload, and where it comes back.
    """

    nodes: tuple[RecomputedNode, ...]
    offloaded: tuple[OffloadedNode, ...] = ()

    def __call__(self, program: Program) -> Program:
        """The program with clones and copies, over a graph of its own.

        Raises:
            PlanMismatchError: the program does not have such nodes, or something is read before it is there again.
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
            f"the plan recomputes or offloads, or does so before, a node {name!r} that this program does not compute: "
            "it is for another model or other inputs. Plan again, or load this model's plan."
        )
    return named[name]


@dataclass(slots=True)
class _RecomputeInsertion:
    """`waiting` are the values that are still to be there again, `again` those that are; `copies` lie on the host."""

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
        """Copy a value to the host where it is made, and back before `anchor`; several results are each a value."""
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
        """All that reads a value outside the forward reads what is there again."""
        if original not in self.restored:
            return
        for reader in list(original.users):
            if reader.op == "output" or reader.meta["phase"] in ("forward", PHASE) or reader in self.restored:
                continue
            if self.order[reader] < self.order[anchor]:
                raise PlanMismatchError(
                    f"the plan has {original.name!r} again before {anchor.name!r}, but {reader.name!r} reads it "
                    "earlier. Plan again."
                )
            reader.replace_input_with(original, self.restored[original])


def _values_of(node: fx.Node) -> tuple[fx.Node, ...]:
    """A node, and what selects one of its results."""
    return node, *(user for user in node.users if user.target is operator.getitem)
