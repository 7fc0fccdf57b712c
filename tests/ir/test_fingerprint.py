"""Equal programs have equal fingerprints."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from autoshard.ir.fingerprint import fingerprint
from autoshard.tracing import trace


class Scaled(nn.Module):
    """A model that returns a number beside a tensor."""

    def __init__(self, factor: int) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return x.sin(), self.factor


def test_results_that_are_no_tensors_belong_to_a_program() -> None:
    """Programs that return different numbers have different fingerprints, although their graphs are equal."""
    one, again, two = (trace(Scaled(factor), (torch.ones(2),)) for factor in (1, 1, 2))
    assert one.text() == two.text()
    assert fingerprint(one) == fingerprint(again) != fingerprint(two)
    assert fingerprint(replace(one, output_constants=two.output_constants)) == fingerprint(two)
