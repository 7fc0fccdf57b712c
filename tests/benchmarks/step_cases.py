"""The cases of `tests.benchmarks.step_time`: small transformers with random weights, and what is compared on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

VOCABULARY, LABELS, PATCH = 2048, 10, 16
Batch = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    """One model on batches of one shape; `tokens` of an image are its patches and the class token."""

    model: str
    tokens: int
    batch: int


def _llama(tokens: int) -> nn.Module:
    config = LlamaConfig(
        num_hidden_layers=4,
        hidden_size=256,
        num_attention_heads=8,
        intermediate_size=688,
        vocab_size=VOCABULARY,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def _llama_60m(tokens: int) -> nn.Module:
    """58.5 million parameters."""
    config = LlamaConfig(
        num_hidden_layers=8,
        hidden_size=512,
        num_attention_heads=8,
        intermediate_size=1408,
        vocab_size=32_000,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def _gpt2(tokens: int) -> nn.Module:
    config = GPT2Config(
        n_layer=4,
        n_embd=256,
        n_head=8,
        vocab_size=VOCABULARY,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def _bert(tokens: int) -> nn.Module:
    config = BertConfig(
        num_hidden_layers=4,
        hidden_size=256,
        num_attention_heads=8,
        intermediate_size=1024,
        vocab_size=VOCABULARY,
        max_position_embeddings=1024,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM(config)


def _vit(tokens: int) -> nn.Module:
    config = ViTConfig(
        num_hidden_layers=4,
        hidden_size=256,
        num_attention_heads=8,
        intermediate_size=1024,
        image_size=_image_size(tokens),
        patch_size=PATCH,
        id2label={label: str(label) for label in range(LABELS)},
    )
    return ViTForImageClassification(config)


def _image_size(tokens: int) -> int:
    return PATCH * round((tokens - 1) ** 0.5)


_MODELS: Mapping[str, Callable[[int], nn.Module]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "bert": _bert,
    "vit": _vit,
    "llama-60m": _llama_60m,
}

_TEXTS = ((128, 8), (1024, 4))
_IMAGES = ((197, 8), (1025, 4))
_LARGE = ((128, 8), (1024, 2))

CASES: tuple[Case, ...] = tuple(
    Case(model, tokens, batch)
    for model in _MODELS
    for tokens, batch in {"vit": _IMAGES, "llama-60m": _LARGE}.get(model, _TEXTS)
)
"""All cases. Dropout is off: its masks are drawn by other generators on each side."""


def make_model(case: Case) -> nn.Module:
    """The case's model in training, with the same random weights at each call."""
    torch.manual_seed(0)
    return _MODELS[case.model](case.tokens).train()


def make_batches(case: Case, count: int) -> list[Batch]:
    """Global batches, the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    return [_make_batch(case, generator) for _ in range(count)]


def _make_batch(case: Case, generator: torch.Generator) -> Batch:
    if case.model == "vit":
        size = _image_size(case.tokens)
        pixels = torch.randn(case.batch, 3, size, size, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(0, LABELS, (case.batch,), generator=generator)}
    words = torch.randint(0, VOCABULARY, (case.batch, case.tokens), generator=generator)
    return {"input_ids": words, "labels": words}


@dataclass(frozen=True, slots=True)
class Comparison:
    """One of our plans against rivals, each with the ratio of step times that is to be met.

    With `best` (a target) it is against the fastest of all rivals instead.
    """

    ours: str
    rivals: Mapping[str, float] = field(default_factory=dict)
    best: float | None = None
    ranks: int = 2

    @property
    def contenders(self) -> list[str]:
        """All that run, ours first."""
        return [self.ours, *self.rivals]


COMPARISONS: Mapping[str, Comparison] = {
    "data": Comparison("data-parallel plan", {"DDP": 1.0}),
    "sharded": Comparison("fully sharded plan", {"FSDP2": 0.95, "FSDP2, our reduce-scatter": 1.0}),
    "tensor": Comparison("tensor-parallel plan", {"DTensor": 0.75}),
    "free": Comparison("free choice", {"DDP": 0.95, "FSDP2": 0.95, "DTensor": 0.95}, best=0.95),
    "one": Comparison("mesh of one", {"eager": 1.0}, ranks=1),
    "inductor": Comparison("mesh of one, inductor", {"torch.compile": 1.0}, ranks=1),
}
"""Comparisons by the names of `--contenders`."""


def as_json(case: Case) -> dict[str, Any]:
    """The case as plain data."""
    return {"model": case.model, "tokens": case.tokens, "batch": case.batch}
