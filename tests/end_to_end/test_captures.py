"""Models of speech with masks, counts and targets of unlike lengths train on two Gloo processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autoshard
from tests.runtime.processes import report, run_checks


class Recognises(nn.Module):
    """A model that masks places with a token, adds rows at other places, and compares with concatenated targets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.linear = nn.Embedding(10, 8, sparse=True), nn.Linear(8, 5)
        self.token = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h = self.table(x)
        h[x == 0] = self.token
        special = (x > 6).clone()
        h[special, :] = h[special, :] + self.table(x)[special].tanh()
        is_label = labels >= 0
        counts = torch.bincount(x.flatten(), minlength=10)[x].unsqueeze(-1)
        log_probs = self.linear(h / counts).log_softmax(-1).transpose(0, 1)
        lengths = torch.full((len(x),), x.shape[1])
        return F.ctc_loss(log_probs, labels.masked_select(is_label), lengths, is_label.sum(-1), zero_infinity=True)


def _train_on_two() -> None:
    """Three steps on batches whose masks and targets have other sizes."""
    one_device, model = Recognises(), Recognises()
    sharded: Any = autoshard.compile(model, autoshard.Mesh({"data": 2}))
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        x, labels = (torch.randint(0, high, shape, generator=generator) for high, shape in ((10, (4, 9)), (5, (4, 3))))
        labels[labels == 0] = -100
        expected = one_device(x, labels)
        expected.backward()
        loss = sharded(x, labels)
        loss.backward()
        torch.testing.assert_close(loss, expected)
        mine = dict(sharded.named_parameters())
        for name, parameter in one_device.named_parameters():
            assert parameter.grad is not None
            found = mine[name].grad
            torch.testing.assert_close(found.full_tensor(), parameter.grad.to_dense(), rtol=1e-4, atol=1e-6)
        one_device.zero_grad()
        sharded.zero_grad()


@pytest.mark.slow
def test_two_processes_equal_one_device() -> None:
    """Loss and all gradients of each step on two processes equal one device."""
    report(run_checks({"train": _train_on_two}, ranks=2), "train")
