"""Starts a collective of values right after its operand, so that independent computation overlaps with it.

Before → after, for a product in a backward under tensor parallelism: `w = x.t() @ dy; dx = dy @ weight.t(); c =
all_reduce(dx); z = f(wait(c))` → `dx = ...; c = all_reduce(dx); w = x.t() @ dy; z = f(wait(c))`. The gradient of the
weight, for which nothing waits, is computed while that of the input is under way. Calls pass each other only between
two waits for such collectives, so a value lives at most until the next wait. Other passes move collectives of gradients
and parameters, which have communicators of their own.

A start passes few reductions of gradients (`_MOST_PASSED`). Under data parallelism a backward sends one value at its
end, the gradient of a table of positions, which depends on the whole backward. It would bring the whole chain of input
gradients ahead of all weights' gradients. Then no reduction would start in the first two thirds of the backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import fx

from autoshard.ir.collectives import is_collective, is_wait
from autoshard.ir.communicators import Purpose, is_for, without_purpose
from autoshard.ir.lowered import PhasedProgram
from passes.preparation.rewriting import in_order

_MOST_PASSED = 8
"""A layer under tensor parallelism reduces no more gradients between two waits: of four matrices, biases and norms."""


@dataclass(frozen=True, slots=True)
class StartSoon:
    """Moves collectives of values up to their operands."""

    def __call__(self, phased: PhasedProgram) -> PhasedProgram:
        """The phases with collectives of values in the forward and the backward moved up."""
        return replace(phased, forward=_rewritten(phased.forward), backward=_rewritten(phased.backward))


def _rewritten(graph_module: fx.GraphModule) -> fx.GraphModule:
    if not any(_sends_values(node) for node in graph_module.graph.nodes):
        return graph_module
    return in_order(graph_module, _order(graph_module.graph))


def _sends_values(node: fx.Node) -> bool:
    return is_collective(node) and without_purpose(str(node.args[-1])) == node.args[-1]


def _order(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes, where a start and its operands come first among the nodes since the last wait."""
    passed: list[fx.Node] = []
    reductions = 0
    for node in graph.nodes:
        if node.op == "placeholder":
            yield node
        elif node.op == "output" or (is_wait(node) and _sends_values(node.all_input_nodes[0])):
            yield from (*passed, node)
            passed, reductions = [], 0
        elif _sends_values(node):
            needed = _needed(node, passed)
            yield from (*(item for item in passed if item in needed), node)
            passed = [item for item in passed if item not in needed]
            reductions = sum(map(_reduces_gradients, passed))
        else:
            passed.append(node)
            reductions += _reduces_gradients(node)
            if reductions > _MOST_PASSED:
                count = 1 + next(place for place, item in enumerate(passed) if _reduces_gradients(item))
                yield from passed[:count]
                passed, reductions = passed[count:], reductions - 1


def _reduces_gradients(node: fx.Node) -> bool:
    purposes = (Purpose.GRADIENTS, Purpose.NARROW_GRADIENTS)
    return is_collective(node) and any(is_for(str(node.args[-1]), purpose) for purpose in purposes)


def _needed(start: fx.Node, among: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes among `among`, in order, that a start depends on."""
    needed = set(start.all_input_nodes)
    for node in reversed(among):
        if node in needed:
            needed.update(node.all_input_nodes)
    return needed
