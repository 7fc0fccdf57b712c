"""`check_plan` compares models with all kinds of outputs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autoshard import Mesh
from autoshard.testing import check_plan


class Ends(nn.Module):
    """A model of a linear layer and a function of its output."""

    def __init__(self, end: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.end = nn.Linear(4, 4), end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.linear(x))


@pytest.mark.parametrize("end", [lambda h: h.argmax(-1), lambda h: h.detach()], ids=["integers", "detached"])
def test_outputs_without_gradients_are_compared(end: Callable[[Tensor], Tensor]) -> None:
    """A model whose outputs require no gradient is compared in outputs and parameters, without training."""
    report = check_plan(Ends(end), Mesh({"data": 2}), (torch.randn(4, 4),))
    assert report.is_equal
    assert {item.name for item in report.comparisons} == {
        "output:0",
        "parameter linear.weight",
        "parameter linear.bias",
    }


def test_complex_outputs_are_trained() -> None:
    """A model with complex outputs is trained, and its gradients are compared."""
    report = check_plan(Ends(lambda h: torch.fft.fft(h)), Mesh({"data": 2}), (torch.randn(4, 4),))
    assert report.is_equal
    assert "gradient linear.weight" in {item.name for item in report.comparisons}
