"""Verifies that the two halves of a split backward compute the results of the whole backward.

The calls of the halves are looked up among the value numbers (`passes.preparation.number_values`) of the whole. The
first half returns the gradients for other stages, and then the values from which the second half starts. Every call
must be a call of the whole backward, and the results must have the numbers of its results.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from autoshard.errors import VerificationError
from autoshard.ir.lowered import PhasedProgram
from passes.preparation.number_values import Numbering, number_graph


def verify_cut_backward(phased: PhasedProgram) -> None:
    """Prove that the halves of a split backward compute the results of the whole backward.

    Does nothing if the backward of `phased` is not split.

    Raises:
        VerificationError: a call or a result differs. The message names it.
    """
    halves = phased.halves
    if halves is None:
        return
    whole = number_graph(phased.backward)
    taken = [whole.numbers[node] for node in phased.backward.graph.find_nodes(op="placeholder")]
    due = [whole.numbers[node] for node in _results(phased.backward)]
    whole.restart_draws()
    first = _walk(whole, halves.inputs, taken)
    count = len(phased.backward_outputs)
    found = [*first[:count], *_walk(whole, halves.weights, first[count:])]
    if found != due:
        raise VerificationError(f"The halves of a backward return values {found}, where the whole returns {due}.")


def _walk(numbering: Numbering, graph_module: fx.GraphModule, inputs: Sequence[int]) -> list[int]:
    """Return the value numbers of the results of one half of a backward.

    `inputs` are the value numbers of its inputs.

    Raises:
        VerificationError: a call of the half is no call of the whole backward.
    """
    placeholders = list(graph_module.graph.find_nodes(op="placeholder"))
    if len(placeholders) != len(inputs):
        raise VerificationError(f"A half of a backward takes {len(placeholders)} values, and is given {len(inputs)}.")
    numbering.numbers.update(zip(placeholders, inputs, strict=True))
    known = len(numbering.nodes)
    for node in graph_module.graph.nodes:
        if node.op not in ("placeholder", "output") and numbering.add_node(node, graph_module) >= known:
            raise VerificationError(
                f"Node {node.name!r}, {node.format_node()}, is no call of the backward that is cut."
            )
    return [numbering.numbers[node] for node in _results(graph_module)]


def _results(graph_module: fx.GraphModule) -> list[fx.Node]:
    return list(graph_module.graph.output_node().args[0])  # type: ignore[arg-type]
