"""Starts a collective of an activation or its gradient early, so that independent computation overlaps with it.

Before → after, for a matrix product in a backward under tensor parallelism: `w = x.t() @ dy; dx = dy @ weight.t(); c =
all_reduce(dx); z = f(wait(c))` → `dx = ...; c = all_reduce(dx); w = x.t() @ dy; z = f(wait(c))`. The gradient `w` of
the weight is computed while the gradient `dx` of the input is reduced. Collectives of parameters and of parameters'
gradients have communicators of their own, and other passes move them.

Calls change their order only between the waits for two such collectives. So a value is kept at most until the next
wait.

A collective may move past few reductions of gradients (`_MOST_PASSED`). Under data parallelism, a backward may have a
single such collective at its end, for the gradient of a table of positions. The whole chain of input gradients would
otherwise move ahead of all weights' gradients. No gradient's reduction would then start in the first two thirds of the
backward.
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
"""Number of reductions of gradients that a collective may move past.

A layer under tensor parallelism reduces at most eight gradients between two waits: of four matrices, their biases and
norms.
"""


@dataclass(frozen=True, slots=True)
class StartSoon:
    """Moves collectives of activations, and the calls that they need, up past independent calls."""

    def __call__(self, phased: PhasedProgram) -> PhasedProgram:
        return replace(phased, forward=_rewritten(phased.forward), backward=_rewritten(phased.backward))


def _rewritten(graph_module: fx.GraphModule) -> fx.GraphModule:
    if not any(_sends_values(node) for node in graph_module.graph.nodes):
        return graph_module
    return in_order(graph_module, _order(graph_module.graph))


def _sends_values(node: fx.Node) -> bool:
    return is_collective(node) and without_purpose(str(node.args[-1])) == node.args[-1]


def _order(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield the nodes of a graph in the new order.

    Each collective of an activation comes right after the last wait for such a collective, behind the nodes that it
    needs. All other nodes since that wait follow.
    """
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
    """Return the operands of the collective `start`, and the nodes in `among` from which they are computed.

    `among` is in graph order.
    """
    needed = set(start.all_input_nodes)
    for node in reversed(among):
        if node in needed:
            needed.update(node.all_input_nodes)
    return needed
