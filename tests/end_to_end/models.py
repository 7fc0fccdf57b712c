"""Small models from transformers, of one layer or more, each with a batch that gives a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

VOCABULARY, BATCH, LENGTH = 48, 8, 8

Inputs = dict[str, Any]


def gpt2(layers: int = 1, dropout: float = 0.0) -> tuple[nn.Module, Inputs]:
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=32, n_layer=layers, n_head=4, use_cache=False,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    return GPT2LMHeadModel(config), _causal_inputs()


def llama(layers: int = 1, dropout: float = 0.0) -> tuple[nn.Module, Inputs]:
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, use_cache=False, attention_dropout=dropout,
        attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config), _causal_inputs()


def bert(layers: int = 1, dropout: float = 0.0) -> tuple[nn.Module, Inputs]:
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        max_position_embeddings=16, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
        attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    inputs = _causal_inputs()
    inputs["attention_mask"] = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    inputs["attention_mask"][1, 5:] = 0
    return BertForMaskedLM(config), inputs


def t5(layers: int = 1) -> tuple[nn.Module, Inputs]:
    """An encoder-decoder; one embedding serves both halves and the head."""
    config = T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=layers, num_heads=4, dropout_rate=0.0,
        use_cache=False, decoder_start_token_id=0, pad_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    return T5ForConditionalGeneration(config), _causal_inputs()


def vit(layers: int = 1) -> tuple[nn.Module, Inputs]:
    config = ViTConfig(
        hidden_size=32, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=48, image_size=8,
        patch_size=4, num_labels=5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(BATCH, 3, 8, 8, generator=generator)
    return ViTForImageClassification(config), {"pixel_values": pixels, "labels": torch.arange(BATCH) % 5}


def odd() -> tuple[nn.Module, Inputs]:
    """GPT-2 in sizes that no mesh divides: seven heads, a prime vocabulary, a batch of five sequences of seven."""
    config = GPT2Config(
        vocab_size=47, n_positions=13, n_embd=28, n_layer=1, n_head=7, use_cache=False, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    tokens = torch.randint(0, 47, (5, 7), generator=torch.Generator().manual_seed(1))
    return GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}


MODELS: dict[str, Callable[..., tuple[nn.Module, Inputs]]] = {"gpt2": gpt2, "llama": llama, "bert": bert}


def _causal_inputs() -> Inputs:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)
    labels = tokens.clone()
    labels[0, :3] = -100
    return {"input_ids": tokens, "labels": labels}
