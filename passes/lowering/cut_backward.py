"""Splits the backward of a pipeline stage in two, so that the previous stage waits only for the first half.

Before: one graph computes the gradients of the stage's inputs and of its weights. After: the first graph has the calls
that the gradients sent to other stages need. The second graph has all other calls, and starts from values of the first
graph (Qi et al. 2023, "Zero Bubble Pipeline Parallelism"). The first graph is empty for a stage that sends no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autoshard.graphs.cut_graph import cut_graph
from autoshard.ir.lowered import BackwardHalves, PhasedProgram


@dataclass(frozen=True, slots=True)
class CutBackward:
    """Splits the backward into a half for the inputs' gradients and a half for the weights' gradients."""

    def __call__(self, phased: PhasedProgram) -> PhasedProgram:
        """Return the program with its field `halves`: the graphs of both halves of the backward.

        The field `backward` stays.
        """
        sent = range(len(phased.backward_outputs))
        taken = len(phased.backward.graph.find_nodes(op="placeholder"))
        inputs, weights, _ = cut_graph(phased.backward, sent, hands_on=taken)
        return replace(phased, halves=BackwardHalves(inputs, weights))
