"""Splits the backward of a pipeline's stage in two, so that the previous stage waits only for the first half.

Before → after: `saved, tangents → sent gradients, gradients of weights` as one graph → the calls that the sent
gradients need, and all other calls, which start from values of the first half (Qi et al. 2023, "Zero Bubble Pipeline
Parallelism"). The first half is empty for a stage that sends no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autoshard.graphs.cut_graph import cut_graph
from autoshard.ir.lowered import BackwardHalves, PhasedProgram


@dataclass(frozen=True, slots=True)
class CutBackward:
    """Splits the backward into the halves for inputs and weights."""

    def __call__(self, phased: PhasedProgram) -> PhasedProgram:
        """Add the halves of the backward to the phases."""
        sent = range(len(phased.backward_outputs))
        inputs, weights, _ = cut_graph(phased.backward, sent, hands_on_inputs=True)
        return replace(phased, halves=BackwardHalves(inputs, weights))
