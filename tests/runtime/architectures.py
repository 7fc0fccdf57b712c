"""Tiny models of transformers with random weights, each with a batch, for tests of weight files."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from tests import models

WORDS, WIDTH, INNER = 47, 16, 24
"""Sizes of the models; the number of words is prime, so that no mesh divides the embedding."""

_SMALL = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16, "head_dim": 4,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def _tokens() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(3, WORDS, (2, 7), generator=torch.Generator().manual_seed(1))}


def _image() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))}


def _of_words(kind: str, **options: Any) -> Callable[[], nn.Module]:
    return partial(models.build, kind, **{**_SMALL, **options})


_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 12, "num_local_experts": 3, "num_experts": 3}

BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "llama": _of_words("llama", tie_word_embeddings=False),
    "qwen2, tied": _of_words("qwen2", tie_word_embeddings=True),
    "gemma2, tied": _of_words("gemma2", query_pre_attn_scalar=4),
    "gpt2, tied": _of_words("gpt2", n_embd=WIDTH, n_layer=2, n_head=4, n_positions=16),
    "gpt_neox": _of_words("gpt_neox"),
    "opt, tied": _of_words("opt", ffn_dim=INNER, word_embed_proj_dim=WIDTH),
    "mixtral, experts apart in files": _of_words("mixtral", **_MOE),
    "qwen3_moe, experts apart in files": _of_words("qwen3_moe", **_MOE),
    "bert, tied": _of_words("bert"),
    "t5, tied thrice": partial(
        models.build, "t5", words=WORDS, width=WIDTH, d_kv=4, inner=INNER, layers=2, heads=4, decoder_start_token_id=0
    ),
    "vit": partial(
        models.build, "vit", width=WIDTH, inner=INNER, layers=2, heads=4, image_size=16, patch_size=4, num_labels=5
    ),
    "resnet, buffers": partial(
        models.build, "resnet", embedding_size=6, hidden_sizes=[8, 10], depths=[1, 1], num_labels=5
    ),
}


def build(name: str, seed: int = 0) -> nn.Module:
    """Return a model in evaluation mode; noise is added to every parameter and to running statistics."""
    model = BUILDERS[name]().eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        for path, buffer in model.named_buffers():
            if path.endswith(("running_mean", "running_var")):
                buffer.add_(torch.rand_like(buffer))
    return model


def logits(name: str, model: nn.Module) -> torch.Tensor:
    """Return the logits of a model for its batch."""
    batch = _image() if name in ("vit", "resnet, buffers") else _tokens()
    if name.startswith("t5"):
        batch["decoder_input_ids"] = batch["input_ids"]
    with torch.no_grad():
        return model(**batch).logits
