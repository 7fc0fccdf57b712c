"""Models of transformers train in micro-batches of which only some contain padding or packed sequences."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoshard

PARTS = 4
KINDS = ("Llama", "Mistral", "Bert", "T5", "Bart")
QUICK = {("Mistral", "data"), ("Bert", "pipeline")}


def padded(kind: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a small model of transformers, and a batch of four parts, two with padding."""
    import transformers

    sizes: dict[str, Any] = {
        "Bert": {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
        "T5": {
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 32,
            "num_layers": 1,
            "num_heads": 2,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
        },
        "Bart": {
            "d_model": 16,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 32,
            "dropout": 0.0,
        },
    }
    default = {**sizes["Bert"], "num_key_value_heads": 2, "use_cache": False, "max_position_embeddings": 32}
    heads = {"Bert": "BertForMaskedLM", "T5": "T5ForConditionalGeneration", "Bart": "BartForConditionalGeneration"}
    still = {"Bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}}.get(kind, {})
    config = getattr(transformers, f"{kind}Config")(vocab_size=32, **sizes.get(kind, default), **still)
    torch.manual_seed(0)
    model = getattr(transformers, heads.get(kind, f"{kind}ForCausalLM"))(config)
    tokens = torch.randint(3, 32, (2 * PARTS, 8))
    mask = torch.ones_like(tokens)
    mask[2, 5:], mask[4, 6:], mask[5, 3:] = 0, 0, 0
    return model.train(), {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


@pytest.mark.parametrize(
    ("kind", "axes"),
    [
        pytest.param(kind, axes, marks=[] if (kind, *axes) in QUICK else [pytest.mark.slow], id=f"{kind}-{axes}")
        for kind in KINDS
        for axes in ({"data": 2}, {"pipeline": 2})
    ],
)
def test_padded_batches_of_transformers_train_like_one_device(kind: str, axes: dict[str, int]) -> None:
    """Masks of padding that only some parts have, in micro-batches and in stages of a pipeline."""
    compare(*padded(kind), axes)


@pytest.mark.sample(1)
@pytest.mark.parametrize("axes", [{"data": 2}, {"pipeline": 2}], ids=str)
def test_packed_sequences_train_like_one_device(axes: dict[str, int]) -> None:
    """Rows of two packed sequences, told apart by their positions, train as on one device."""
    model, batch = padded("Llama")
    lengths = torch.tensor([[3, 5], [4, 4], [8, 0], [8, 0], [2, 6], [5, 3], [7, 1], [1, 7]])
    positions = torch.stack([torch.cat([torch.arange(int(length)) for length in row]) for row in lengths])
    compare(model, {"input_ids": batch["input_ids"], "position_ids": positions, "labels": batch["input_ids"]}, axes)


def compare(model: nn.Module, batch: dict[str, Tensor], axes: dict[str, int]) -> None:
    """One step of SGD in micro-batches beside one device."""
    alone = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = autoshard.compile(model, autoshard.Mesh(axes), optimizer=optimizer, micro_batches=PARTS, time_budget_s=2)
    expected = alone(**batch).loss
    expected.backward()
    torch.testing.assert_close(step(**batch), expected.detach(), rtol=1e-5, atol=1e-5)
    held = dict(step.sharded.named_parameters())
    for name, value in alone.named_parameters():
        grad = torch.zeros_like(value) if value.grad is None else value.grad
        torch.testing.assert_close(held[name].detach(), (value - 0.1 * grad).detach(), rtol=1e-4, atol=1e-5)
