"""Cut the backward of a pipeline's stage in two, so that the stage before waits for the first half alone.

Before → after: `saved, tangents → sent gradients, gradients of weights` as one graph → the calls that the sent
gradients need, by reachability; and all others, which go on from what the first half keeps for them (Qi et al. 2023,
"Zero Bubble Pipeline Parallelism"). The first half of a stage that sends no gradient computes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autoshard.graphs.cut_graph import cut_graph
from autoshard.ir.lowered import BackwardHalves, PhasedProgram


@dataclass(frozen=True, slots=True)
class CutBackward:
    """See the module's docstring."""

    def __call__(self, phased: PhasedProgram) -> PhasedProgram:
        """The phases with the halves of the backward beside it."""
        sent = range(len(phased.backward_outputs))
        inputs, weights, _ = cut_graph(phased.backward, sent, hands_on_inputs=True)
        return replace(phased, halves=BackwardHalves(inputs, weights))
