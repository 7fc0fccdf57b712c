"""Meshes and constraints for small models that produce the layouts that human experts write by hand."""

from __future__ import annotations

from typing import Any

from autoshard import Mesh, P, PartitionSpec, Recipe

PAIR, SQUARE, STAGES = Mesh({"data": 2}), Mesh({"data": 2, "model": 2}), Mesh({"pipeline": 2, "data": 2})
ZERO_1 = {"*weight": P(), "*:*weight": P("data"), "input:*": P("data")}
ZERO_3 = {**ZERO_1, "*weight": P("data")}
STEP_LAYOUTS: dict[str, tuple[Mesh, dict[str, Any]]] = {
    "data": (PAIR, {"constraints": {"input:*": P("data"), "*weight": P()}}),
    "tensor": (SQUARE, {"constraints": {"first.weight": P("model"), "second.weight": P(None, "model")}}),
    "ZeRO-1": (PAIR, {"constraints": ZERO_1, "micro_batches": 2}),
    "ZeRO-3": (PAIR, {"constraints": ZERO_3, "micro_batches": 2}),
    "pipeline": (STAGES, {"micro_batches": 2}),
    "zero bubble": (
        Mesh({"pipeline": 2}),
        {"micro_batches": 4, "recipe": Recipe(schedule="ZBVZeroBubble", virtual_stages=2)},
    ),
}
"""Mesh and arguments of `compile` for a training step of two linear layers, `first` and `second`."""

DATA = {"input:*": P("data")}

TENSOR = {
    "gpt2": {
        "transformer.wte.weight": P("model"),
        "transformer.h.*.attn.c_attn.weight": P(None, "model"),
        "transformer.h.*.attn.c_proj.weight": P("model"),
        "transformer.h.*.mlp.c_fc.weight": P(None, "model"),
        "transformer.h.*.mlp.c_proj.weight": P("model"),
    },
    "llama": {
        "model.embed_tokens.weight": P("model"),
        "model.layers.*.self_attn.[qkv]_proj.weight": P("model"),
        "model.layers.*.self_attn.o_proj.weight": P(None, "model"),
        "model.layers.*.mlp.gate_proj.weight": P("model"),
        "model.layers.*.mlp.up_proj.weight": P("model"),
        "model.layers.*.mlp.down_proj.weight": P(None, "model"),
        "lm_head.weight": P("model"),
    },
    "bert": {
        "bert.embeddings.word_embeddings.weight": P("model"),
        "bert.encoder.layer.*.attention.self.*.weight": P("model"),
        "bert.encoder.layer.*.attention.output.dense.weight": P(None, "model"),
        "bert.encoder.layer.*.intermediate.dense.weight": P("model"),
        "bert.encoder.layer.*.output.dense.weight": P(None, "model"),
    },
}

FULLY_SHARDED = {
    "gpt2": {"transformer.wte.weight": P(("data", "model")), "transformer.h.*.c_*.weight": P("data", "model")},
    "llama": {"model.embed_tokens.weight": P(("data", "model")), "model.layers.*_proj.weight": P("data", "model")},
    "bert": {
        "bert.embeddings.word_embeddings.weight": P(("data", "model")),
        "bert.encoder.layer.*.dense.weight": P("data", "model"),
    },
}


def layouts(name: str) -> dict[str, dict[str, PartitionSpec]]:
    """Return the constraints of each layout, by name, for a model "gpt2", "llama" or "bert"."""
    return {
        "chosen": {},
        "data": DATA,
        "tensor": TENSOR[name],
        "data and tensor": {**DATA, **TENSOR[name]},
        "fully sharded": {**DATA, **FULLY_SHARDED[name]},
    }
