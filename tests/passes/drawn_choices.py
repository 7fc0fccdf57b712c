"""Random choices in the planning problems of three small programs, and predictions for these choices."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from random import Random

import torch
from torch import nn

from autoshard.ir.plan_parts import Prediction
from autoshard.ir.program import Program
from autoshard.tracing import trace
from passes.driver.plan_of_choice import lowered_plan
from passes.driver.plan_options import PlanOptions
from passes.planning.build_assignment import PlanningProblem
from tests.passes.blocks import blocks_program, perceptron_program


class Classifier(nn.Module):
    """A linear layer and a cross-entropy, which communicates inside its call if the classes are split."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 32)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(x), labels)


@cache
def program_of(name: str) -> Program:
    """Return the traced program "perceptron" or "classifier", and four blocks for any other name."""
    if name == "perceptron":
        return perceptron_program()
    if name == "classifier":
        return trace(Classifier(), (torch.randn(8, 16), torch.zeros(8, dtype=torch.int64)))
    return blocks_program(count=4)


def drawn_choice(planning: PlanningProblem, seed: int) -> list[int]:
    """Draw one strategy, as an index, for every class of sites."""
    draw = Random(seed)
    return [draw.randrange(len(planning.space.sites[group[0]].strategies)) for group in planning.members]


def predicted(planning: PlanningProblem, choice: Sequence[int], dispatch: str = "eager") -> Prediction:
    """The prediction for the lowered plan of a choice."""
    options = PlanOptions(dispatch=dispatch)
    return lowered_plan(planning, choice, 0.0, None, planning.prices.cluster, options).plan.predicted
