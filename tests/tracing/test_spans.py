"""Random spans drawn by torch have the distribution of transformers' NumPy code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers.models.hubert import modeling_hubert

import autoshard
from autoshard.runtime.seeds import SeedSequence
from autoshard.testing.training import drawing_alike
from autoshard.tracing import trace
from autoshard.tracing.spans import draw_spans

_compute_mask_indices: Any = modeling_hubert._compute_mask_indices


def _mask(*ones: int, length: int = 20) -> Tensor:
    return (torch.arange(length) < torch.tensor(ones)[:, None]).long()


@pytest.mark.parametrize(
    ("prob", "span", "mask", "least"),
    [(0.3, 4, None, 0), (0.65, 3, None, 2), (0.01, 10, None, 0), (0.3, 4, _mask(20, 12, 5, 2), 2), (0.5, 1, None, 0)],
)
def test_spans_are_distributed_as_those_of_numpy(prob: float, span: int, mask: Tensor | None, least: int) -> None:
    """Each place is masked as often as by transformers' NumPy code, and the counts of masked places are the same."""
    torch.manual_seed(0)
    np.random.seed(0)
    shape, draws = (4, 20), 3000
    found = torch.stack([draw_spans(shape, prob, span, mask, least) for _ in range(draws)]).double()
    theirs = [torch.from_numpy(_compute_mask_indices(shape, prob, span, mask, least)) for _ in range(draws)]
    expected = torch.stack(theirs).double()
    torch.testing.assert_close(found.mean(0), expected.mean(0), atol=0.05, rtol=0)
    assert set(found.sum(2).flatten().tolist()) == set(expected.sum(2).flatten().tolist())


def test_spans_that_do_not_fit_are_refused() -> None:
    """A span longer than the sequence is refused, and the error names the longest span that fits."""
    with pytest.raises(ValueError, match="mask_length= is from 1 to 4"):
        draw_spans((2, 4), 0.5, 5)


class Masks(nn.Module):
    """A model that puts a token in place of random spans, as audio models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.token = nn.Linear(4, 4), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        h = self.linear(x)
        spans = _compute_mask_indices(tuple(x.shape[:2]), 0.5, 3, attention_mask=lengths, min_masks=1)
        h[torch.tensor(spans, device=h.device, dtype=torch.bool)] = self.token.to(h.dtype)
        return h.square().mean()


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_each_step_masks_other_places_the_same_on_all_meshes() -> None:
    """Losses of four steps with different spans equal one device's. Losses and the gradient are equal on all
    meshes, in a program without guards."""
    inputs = (torch.randn(4, 20, 4), _mask(20, 18, 12, 5))
    assert not trace(Masks(), inputs).guards
    one_device = Masks()
    torch.manual_seed(3)
    seeds, expected = SeedSequence(), []
    for _ in range(4):
        with drawing_alike(seeds.draw()):
            expected.append(one_device(*inputs))
    losses = []
    for mesh in (autoshard.Mesh({"data": 1}), autoshard.Mesh({"data": 2}), autoshard.Mesh({"data": 2, "model": 2})):
        model = Masks()
        sharded = autoshard.compile(model, mesh)
        torch.manual_seed(3)
        steps = [sharded(*inputs) for _ in range(4)]
        steps[-1].backward()
        assert model.token.grad is not None
        losses.append(torch.stack([*steps, model.token.grad.norm()]).detach())
    assert len(set(losses[0][:4].tolist())) == 4
    torch.testing.assert_close(losses[0][:4], torch.stack(expected))
    torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(losses[2], losses[0])
