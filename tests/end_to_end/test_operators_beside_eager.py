"""Operators that a compiled step calls beside eager's: no needless copies, casts, additions or views."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
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

import autoshard
from tests.runtime.dispatch import RecordDispatch
from tests.runtime.processes import checked_once, report

LAYERS, WIDTH, HEADS, WORDS = 2, 32, 4, 64
Options = dict[str, Any]
Batch = dict[str, torch.Tensor]


def bert() -> nn.Module:
    sizes: Options = {
        "hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "intermediate_size": 64,
        "vocab_size": WORDS,
    }
    off: Options = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(num_hidden_layers=LAYERS, max_position_embeddings=32, **sizes, **off))


def gpt2() -> nn.Module:
    off: Options = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    sizes: Options = {
        "n_layer": LAYERS,
        "n_embd": WIDTH,
        "n_head": HEADS,
        "vocab_size": WORDS,
        "n_positions": 32,
    }
    return GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **sizes, **off))


def llama() -> nn.Module:
    sizes: Options = {
        "hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "intermediate_size": 64,
        "vocab_size": WORDS,
    }
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=LAYERS, use_cache=False, **sizes))


def vit() -> nn.Module:
    sizes: Options = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "intermediate_size": 64}
    return ViTForImageClassification(ViTConfig(num_hidden_layers=LAYERS, image_size=16, patch_size=4, **sizes))


def _words() -> Batch:
    words = torch.randint(0, WORDS, (2, 16), generator=torch.Generator().manual_seed(0))
    return {"input_ids": words, "labels": words}


def _images() -> Batch:
    return {"pixel_values": torch.ones(2, 3, 16, 16), "labels": torch.tensor([0, 1])}


MODELS: Mapping[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "bert": (bert, _words), "gpt2": (gpt2, _words), "llama": (llama, _words), "vit": (vit, _images),
}  # fmt: skip

KINDS: Mapping[str, tuple[str, ...]] = {
    "copies": ("clone", "copy_", "contiguous"),
    "casts": ("_to_copy",),
    "additions": ("add", "add_", "_foreach_add_"),
    "views": (
        *("view", "_unsafe_view", "reshape", "t", "transpose", "permute", "expand", "unsqueeze", "slice", "select"),
        *("detach", "alias"),
    ),
    "values read by Python": ("_local_scalar_dense",),
}


def counts_of(step: Callable[[], object]) -> Counter[str]:
    """How often a step calls operators of each kind."""
    for _ in range(3):
        step()
    with RecordDispatch() as recorded:
        step()
    assert not recorded.on_dtensors
    names = Counter(name.split(".")[1] for name in recorded.local if name.startswith("aten."))
    return Counter({kind: sum(names[name] for name in members) for kind, members in KINDS.items()})


def check(name: str) -> None:
    make, make_batch = MODELS[name]
    by_hand, batch = make().train(), make_batch()
    optimizer = torch.optim.AdamW(by_hand.parameters(), fused=True)

    def step_by_hand() -> None:
        by_hand(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("data",))
    model = make().train()
    step = autoshard.compile(model, mesh, optimizer=torch.optim.AdamW(model.parameters(), fused=True))
    eager, compiled = counts_of(step_by_hand), counts_of(lambda: step(**batch))
    over = {kind: (compiled[kind], eager[kind]) for kind in KINDS if compiled[kind] > eager[kind]}
    assert not over, f"compiled and eager: {over}; all: {dict(compiled)}, {dict(eager)}"


CHECKS = {name: partial(check, name) for name in MODELS}


outcomes = checked_once(CHECKS, ranks=1)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CHECKS)
def test_no_more_than_eager(outcomes: dict[str, str], name: str) -> None:
    """A compiled step calls no more operators of any kind than eager."""
    report(outcomes, name)
