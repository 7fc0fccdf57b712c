"""Compute values of the forward again in the backward instead of keeping them.

Before → after: for each node `y = f(x)` that is to be recomputed, `y_again = f(x)` is inserted in the backward, just
before the node that the plan names, and all that reads `y` outside the forward reads `y_again`. Operands of a clone are
clones where these are recomputed too, and else the values that the forward keeps. The forward then keeps `y` no longer:
phases are cut by who reads what. Clones carry phase "recompute", which runs within the backward.

A clone is equal to its original because nodes are pure and random operators are indexed by a counter; the verifier
(`verify_preparation`) numbers both alike, or refuses.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from autoshard.errors import PlanMismatchError
from autoshard.ir.program import Program
from autoshard.ir.recompute import PHASE, RecomputedNode
from passes.rewriting import copy_program

_ORIGINAL = "recomputes"


def original_of(node: fx.Node) -> str | None:
    """The name of the node that a clone computes again; None for what is no clone."""
    return node.meta.get(_ORIGINAL)


@dataclass(frozen=True, slots=True)
class InsertRecompute:
    """See the module's docstring.

    Args:
        nodes: what to recompute, and where.
    """

    nodes: tuple[RecomputedNode, ...]

    def __call__(self, program: Program) -> Program:
        """The program with clones, over a graph of its own.

        Raises:
            PlanMismatchError: the program does not have such nodes, or something is read before it is recomputed.
        """
        if not self.nodes:
            return program
        program = copy_program(program)
        named = {node.name: node for node in program.graph.nodes}
        by_anchor: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for item in self.nodes:
            by_anchor[_find(named, item.before)].append(_find(named, item.name))
        _Inserting(program.graph, by_anchor).run()
        program.graph_module.recompile()
        return program


def _find(named: Mapping[str, fx.Node], name: str) -> fx.Node:
    if name not in named or named[name].op != "call_function":
        raise PlanMismatchError(
            f"the plan recomputes, or recomputes before, a node {name!r} that this program does not compute: it is for "
            "another model or other inputs. Plan again, or load this model's plan."
        )
    return named[name]


@dataclass(slots=True)
class _Inserting:
    """`waiting` are the values that are still to be recomputed, `clones` those that have been."""

    graph: fx.Graph
    by_anchor: Mapping[fx.Node, list[fx.Node]]
    order: dict[fx.Node, int] = field(init=False)
    waiting: set[fx.Node] = field(init=False)
    clones: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.order = {node: index for index, node in enumerate(self.graph.nodes)}
        self.waiting = {value for nodes in self.by_anchor.values() for node in nodes for value in _values_of(node)}

    def run(self) -> None:
        for anchor in sorted(self.by_anchor, key=self.order.__getitem__):
            nodes = sorted(self.by_anchor[anchor], key=self.order.__getitem__)
            with self.graph.inserting_before(anchor):
                originals = [original for node in nodes for original in _values_of(node)]
                for original in originals:
                    self._clone(original)
            for original in originals:
                self._read_clone(original, anchor)
        for clone in reversed(self.clones.values()):
            if not clone.users:
                self.graph.erase_node(clone)

    def _clone(self, original: fx.Node) -> None:
        early = self.waiting.intersection(original.all_input_nodes)
        if early:
            raise PlanMismatchError(
                f"the plan recomputes {original.name!r} before its operand {min(map(str, early))!r}. Plan again."
            )
        clone = self.graph.node_copy(original, lambda operand: self.clones.get(operand, operand))
        clone._rename(f"{original.name}_again")
        clone.meta = {**original.meta, "phase": PHASE, _ORIGINAL: original.name}
        self.clones[original] = clone
        self.waiting.remove(original)

    def _read_clone(self, original: fx.Node, anchor: fx.Node) -> None:
        """All that reads a recomputed value outside the forward reads the clone."""
        for reader in list(original.users):
            if reader.op == "output" or reader.meta["phase"] in ("forward", PHASE) or reader in self.clones:
                continue
            if self.order[reader] < self.order[anchor]:
                raise PlanMismatchError(
                    f"the plan recomputes {original.name!r} before {anchor.name!r}, but {reader.name!r} reads it "
                    "earlier. Plan again."
                )
            reader.replace_input_with(original, self.clones[original])


def _values_of(node: fx.Node) -> tuple[fx.Node, ...]:
    """A node, and what selects one of its results."""
    return node, *(user for user in node.users if user.target is operator.getitem)
