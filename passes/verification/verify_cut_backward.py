"""Verifies that the two halves of a split backward compute the results of the whole backward.

The calls of the halves are looked up among the value numbers (`passes.preparation.number_values`) of the whole. The
first half returns the gradients for other stages, and then the values from which the second half starts. Every call
must be a call of the whole backward, and the results must have the numbers of its results.
"""

from __future__ import annotations

from autoshard.errors import VerificationError
from autoshard.ir.lowered import PhasedProgram
from passes.preparation.number_values import number_graph
from passes.verification.verify_phases import results_of, walk


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
    due = [whole.numbers[node] for node in results_of(phased.backward)]
    whole.restart_draws()
    first = walk(whole, halves.inputs, taken, "first half")
    count = len(phased.backward_outputs)
    found = [*first[:count], *walk(whole, halves.weights, first[count:], "second half")]
    if found != due:
        raise VerificationError(f"The halves of a backward return values {found}, where the whole returns {due}.")
