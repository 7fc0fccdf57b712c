"""What a compiled step calls beside eager's: no needless copies, casts, additions or views."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import autoshard
from tests.runtime.dispatch import RecordDispatch
from tests.runtime.processes import report, run_checks

LAYERS, WIDTH, HEADS, WORDS = 2, 32, 4, 64
Options = dict[str, Any]


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


MODELS: Mapping[str, Callable[[], nn.Module]] = {"bert": bert, "gpt2": gpt2, "llama": llama}

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

MORE: Mapping[str, int] = {"copies": 4 * LAYERS}
"""What a compiled step may have more than eager.

Attention's result and its three gradients lie by rows, head beside head; the trace takes them to lie head by head, and
has them copied to rows.
"""


def counts_of(step: Callable[[torch.Tensor], object]) -> Counter[str]:
    """How often a step calls operators of each kind."""
    words = torch.randint(0, WORDS, (2, 16), generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        step(words)
    with RecordDispatch() as recorded:
        step(words)
    assert not recorded.on_dtensors
    names = Counter(name.split(".")[1] for name in recorded.local if name.startswith("aten."))
    return Counter({kind: sum(names[name] for name in members) for kind, members in KINDS.items()})


def check(make: Callable[[], nn.Module]) -> None:
    by_hand = make().train()
    optimizer = torch.optim.AdamW(by_hand.parameters(), fused=True)

    def step_by_hand(words: torch.Tensor) -> None:
        by_hand(input_ids=words, labels=words).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("data",))
    model = make().train()
    step = autoshard.compile(model, mesh, optimizer=torch.optim.AdamW(model.parameters(), fused=True))
    eager, compiled = counts_of(step_by_hand), counts_of(lambda words: step(input_ids=words, labels=words))
    over = {kind: (compiled[kind], eager[kind]) for kind in KINDS if compiled[kind] > eager[kind] + MORE.get(kind, 0)}
    assert not over, f"compiled and eager: {over}; all: {dict(compiled)}, {dict(eager)}"


def check_bert() -> None:
    check(bert)


def check_gpt2() -> None:
    check(gpt2)


def check_llama() -> None:
    check(llama)


CHECKS = {"bert": check_bert, "gpt2": check_gpt2, "llama": check_llama}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return run_checks(CHECKS, ranks=1)


@pytest.mark.parametrize("name", CHECKS)
def test_no_more_than_eager(outcomes: dict[str, str], name: str) -> None:
    """Of each kind of operators, a compiled step calls what eager calls, and what `MORE` says."""
    report(outcomes, name)
