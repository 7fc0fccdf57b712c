"""Models of transformers train in micro-batches of which only some have padding or packed sequences."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoshard
from tests.end_to_end.training import assert_trains_alike
from tests.models import build

PARTS = 4
_SMALL: dict[str, Any] = {"words": 32, "width": 16, "inner": 32, "layers": 1, "heads": 2}
_CAUSAL: dict[str, Any] = {**_SMALL, "key_heads": 2, "length": 32, "use_cache": False}
_SIDES = {"layers": 1, "attention_heads": 2, "ffn_dim": 32}
SIZES: Mapping[str, dict[str, Any]] = {
    "llama": _CAUSAL,
    "mistral": _CAUSAL,
    "bert": _SMALL,
    "t5": {**_SMALL, "d_kv": 8, "decoder_start_token_id": 0},
    "bart": {"words": 32, "d_model": 16}
    | {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in _SIDES.items()},
}
QUICK = {("mistral", "data"), ("bert", "pipeline")}


def padded(kind: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a small model of transformers and a batch of four micro-batches, of which two have padding."""
    model = build(kind, dropout=0.0, **SIZES[kind])
    tokens = torch.randint(3, 32, (2 * PARTS, 8))
    mask = torch.ones_like(tokens)
    mask[2, 5:], mask[4, 6:], mask[5, 3:] = 0, 0, 0
    return model.train(), {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


@pytest.mark.parametrize(
    ("kind", "axes"),
    [
        pytest.param(kind, axes, marks=[] if (kind, *axes) in QUICK else [pytest.mark.slow], id=f"{kind}-{axes}")
        for kind in SIZES
        for axes in ({"data": 2}, {"pipeline": 2})
    ],
)
def test_padded_batches_of_transformers_train_like_one_device(kind: str, axes: dict[str, int]) -> None:
    """With padding in only some micro-batches, a step equals one device, on data ranks and in pipeline stages."""
    compare(*padded(kind), axes)


@pytest.mark.sample(1)
@pytest.mark.parametrize("axes", [{"data": 2}, {"pipeline": 2}], ids=str)
def test_packed_sequences_train_like_one_device(axes: dict[str, int]) -> None:
    """Rows of two packed sequences, told apart by their positions, train as on one device."""
    model, batch = padded("llama")
    lengths = torch.tensor([[3, 5], [4, 4], [8, 0], [8, 0], [2, 6], [5, 3], [7, 1], [1, 7]])
    positions = torch.stack([torch.cat([torch.arange(int(length)) for length in row]) for row in lengths])
    compare(model, {"input_ids": batch["input_ids"], "position_ids": positions, "labels": batch["input_ids"]}, axes)


def compare(model: nn.Module, batch: dict[str, Tensor], axes: dict[str, int]) -> None:
    """Check that one SGD step in micro-batches has the loss and parameters of one device."""
    alone = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(item.parameters(), 0.1) for item in (model, alone)]
    step = autoshard.compile(model, autoshard.Mesh(axes), optimizer=optimizers[0], micro_batches=PARTS, time_budget_s=2)
    assert_trains_alike(step, alone, optimizers[1], [batch], loss=(1e-5, 1e-5), parameters=(1e-4, 1e-5))
