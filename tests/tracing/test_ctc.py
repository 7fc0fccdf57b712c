"""Models with `ctc_loss` have the loss and the gradients of one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autoshard
from autoshard.errors import TraceError
from autoshard.tracing import check_guards, trace

MESHES = (autoshard.Mesh({"data": 2}), autoshard.Mesh({"data": 2, "model": 2}))
Lengths = Any
"""A tensor or a list."""


class Recognises(nn.Module):
    """A CTC loss of transcripts, from features [N, T, 4] or [T, 4]."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 5)
        self.options = options

    def forward(self, x: Tensor, targets: Tensor, inputs: Lengths, lengths: Lengths) -> Tensor:
        log_probs = self.linear(x).log_softmax(-1)
        log_probs = log_probs.transpose(0, 1) if x.dim() == 3 else log_probs
        loss = F.ctc_loss(log_probs, targets, inputs, lengths, **self.options)
        return (loss * torch.linspace(1, 2, loss.numel()).view_as(loss)).sum()


def _call(seed: int, lengths: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, targets = torch.randn(4, 9, 4, generator=generator), torch.randint(1, 5, (4, 6), generator=generator)
    return x, targets, torch.tensor([9, 8, 7, 9]), torch.tensor(lengths)


def _check(model: nn.Module, sharded: Any, *call: Any) -> None:
    expected = model(*call)
    gradients = torch.autograd.grad(expected, [*model.parameters()])
    model.zero_grad()
    loss = sharded(*call)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], list(gradients))


@pytest.mark.parametrize(
    ("form", "reduction", "mesh"),
    [
        ("rows", "none", MESHES[0]),
        ("rows", "mean", MESHES[1]),
        ("one behind the other", "mean", MESHES[1]),
        ("lists", "sum", MESHES[0]),
        pytest.param("rows", "none", MESHES[1], marks=pytest.mark.slow),
        pytest.param("rows", "mean", MESHES[0], marks=pytest.mark.slow),
        pytest.param("one behind the other", "mean", MESHES[0], marks=pytest.mark.slow),
        pytest.param("lists", "sum", MESHES[1], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_ctc_loss_equals_one_device(form: str, reduction: str, mesh: autoshard.Mesh) -> None:
    """Loss and gradients equal one device's for targets in rows or concatenated, and lengths as tensors or lists."""
    model = Recognises(reduction=reduction, blank=0, zero_infinity=reduction != "none")
    sharded = autoshard.compile(model, mesh)
    for seed, lengths in enumerate([(3, 2, 1, 2), (1, 0, 4, 3), (2, 2, 2, 2)]):
        x, targets, inputs, counts = _call(seed, lengths)
        if form == "one behind the other":
            targets = torch.cat([row[:count] for row, count in zip(targets, lengths, strict=True)])
        if form == "lists":
            inputs, counts = inputs.tolist(), counts.tolist()
        _check(model, sharded, x, targets, inputs, counts)


def test_a_sequence_without_a_batch() -> None:
    """Log probabilities [T, C] and a target [S] without a batch have one device's loss and gradients."""
    x, targets, _, _ = _call(0, (3,))
    model = Recognises(zero_infinity=True)
    _check(model, autoshard.compile(model, MESHES[0]), x[0], targets[0, :3], torch.tensor(9), torch.tensor(3))


def test_an_impossible_target_is_infinite() -> None:
    """An impossible target has an infinite loss, or zero loss and gradients with `zero_infinity`."""
    x, targets, inputs, _ = _call(0, (3,))
    call = (x, targets, inputs.clamp(max=2), torch.tensor([6, 1, 1, 1]))
    assert autoshard.compile(Recognises(reduction="none"), MESHES[0])(*call).isinf()
    model = Recognises(reduction="none", zero_infinity=True)
    _check(model, autoshard.compile(model, MESHES[0]), *call)


def test_lengths_of_targets_in_rows_are_not_read() -> None:
    """Targets in rows need no guard on their lengths. Concatenated targets guard the longest length, rounded up to a
    multiple of 32."""
    x, targets, inputs, lengths = _call(0, (3, 2, 1, 2))
    assert not trace(Recognises(), (x, targets, inputs, lengths)).guards
    flat = targets.flatten()[:8]
    program = trace(Recognises(), (x, flat, inputs, lengths))
    assert check_guards(program, (x, flat, inputs, torch.tensor([5, 1, 1, 1])))
    assert not check_guards(program, (x, flat, inputs, torch.tensor([40, 1, 1, 1])))


def test_counts_of_sequences_that_differ_are_refused() -> None:
    """Lengths of another number of sequences are refused, and the message has the number."""
    x, targets, inputs, lengths = _call(0, (3, 2, 1, 2))
    with pytest.raises(TraceError, match="log_probs of 4 sequences"):
        trace(Recognises(), (x, targets, inputs[:3], lengths))


def test_sequences_are_split() -> None:
    """In the plan of a long batch, the CTC loss and its backward are split."""
    model = nn.Sequential(nn.Linear(4, 5))
    x, targets = torch.randn(64, 512, 4), torch.randint(1, 5, (64, 64))

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        lengths = torch.full((64,), 512), torch.full((64,), 64)
        return F.ctc_loss(outputs.transpose(0, 1).log_softmax(-1), targets, *lengths)

    plan = autoshard.plan(model, MESHES[0], example_inputs=(x, targets), loss_fn=loss)
    assert {"autoshard.ctc_loss.default", "autoshard.ctc_loss_backward.default"} <= {
        item.operator for item in plan.coverage["split"]
    }
