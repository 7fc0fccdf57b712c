"""Weighted losses of micro-batches add up to the loss of their batch, or the loss is refused."""

from __future__ import annotations

import re

import pytest
import torch

from autoshard.ir.loss_weights import LossWeights
from autoshard.tracing import trace
from passes.verification.weigh_loss import weigh_loss
from tests.end_to_end.test_micro_batches import COUNTED, PARTS, PLAIN, REFUSED, Loss, Model, inputs, penalty


def _weigh(loss: Loss) -> LossWeights:
    """The weights of a loss, from traces of one micro-batch and of two."""
    model, (x, y) = Model(loss), inputs()
    part, pair = (trace(model, (x[:size], y[:size]), {}) for size in (2, 4))
    return weigh_loss(part, pair)


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", [*PLAIN, *COUNTED])
def test_weighed_losses_of_parts_add_up_to_that_of_the_batch(name: str) -> None:
    """Weighted losses of micro-batches add up to the batch's loss, for sums, means, and quotients by a count."""
    loss, (x, y) = {**PLAIN, **COUNTED}[name], inputs(ignored=name in COUNTED)
    model, parts = Model(loss), list(zip(x.chunk(PARTS), y.chunk(PARTS), strict=True))

    def read(part: int, kind: str, slot: str) -> torch.Tensor:
        return model.get_buffer(slot) if kind == "buffer" else parts[part]["input:1" in slot or slot == "y"]

    weights = _weigh(loss).of_parts((1,) * PARTS, read)
    each = torch.stack([model(*part) for part in parts])
    added = (torch.tensor(weights) * each)[torch.tensor(weights) > 0].sum()
    torch.testing.assert_close(added, model(x, y), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_mixes_samples_is_refused(name: str) -> None:
    """A loss that mixes samples of a batch is refused for the expected reason."""
    loss, says = REFUSED[name]
    refusal = _weigh(loss).refusal
    assert refusal is not None
    assert re.search(says, refusal)


def test_what_does_not_depend_on_the_batch_counts_once() -> None:
    """A term without the batch is allowed beside a mean.

    Beside a sum the term is refused, because each part would add it.
    """
    beside_mean = _weigh(lambda m, z, x, y: z.square().mean() + penalty(m))
    assert beside_mean.refusal is None
    assert beside_mean.has_constant
    assert not _weigh(PLAIN["mean"]).has_constant
    for loss in (lambda m, z, x, y: z.square().sum() + penalty(m), lambda m, z, x, y: z.square().sum() + 1.0):
        refusal = _weigh(loss).refusal
        assert refusal is not None
        assert "would count once for each part" in refusal
