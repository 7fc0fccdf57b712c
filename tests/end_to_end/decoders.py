"""Build a small Llama with drawn weights and a batch, from the decoder that the published benchmarks use."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tests.benchmarks.decoder import Decoder, DecoderShape
from tests.benchmarks.deep_models import LLAMA_8B

LLAMA = replace(
    LLAMA_8B, hidden=32, heads=4, kv_heads=2, head_size=8, ffn=48, vocab=48, sequence=8, layers=2,
)  # fmt: skip


def decoder(shape: DecoderShape, seed: int = 0) -> tuple[nn.Module, dict[str, Any]]:
    """Return a decoder with drawn weights, and a batch of eight sequences of drawn tokens and targets."""
    model, generator = Decoder(shape), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
    tokens, targets = torch.randint(0, shape.vocab, (2, 8, shape.sequence), generator=generator)
    return model, {"tokens": tokens, "targets": targets}
