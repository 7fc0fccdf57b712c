"""What drawn programs and plans have found: each as the small program that it was shrunk to."""

from __future__ import annotations

import pytest
import torch

from autoshard import Mesh
from autoshard.testing import check_plan
from autoshard.testing.plans import most_split_plan
from autoshard.testing.programs import run_source
from autoshard.tracing import trace

_HEAD = """
import torch
import torch.nn.functional as F
from torch import nn

"""

PROGRAMS = {
    "a batch norm whose input needs no gradient": """
class Drawn(nn.Module):
    def __init__(self):
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(8, eps=0.01, track_running_stats=False)

    def forward(self, x):
        return self.batch_norm(x.flatten(0, 1)).unflatten(0, (4, 4)).mean()

torch.manual_seed(0)
model = Drawn()
inputs = (torch.randn(4, 4, 8),)
""",
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("mesh", [Mesh({"data": 4}), Mesh({"data": 2, "model": 2})], ids=str)
def test_a_program_that_once_failed(name: str, mesh: Mesh) -> None:
    """The chosen plan, and one with as many splits as there are, equal one device."""
    program = run_source(_HEAD + PROGRAMS[name])
    split = most_split_plan(trace(program.model, program.inputs), mesh)
    for plan in (None, split):
        check_plan(program.model, mesh, program.inputs, plan=plan, precise=torch.float64).raise_if_different()
