"""Names that code on a page may use without defining them: a small Llama, its batch, a mesh, and a cluster."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

import autoshard
from autoshard import Cluster, P, Recipe

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "use_cache": False}


class Classifier(nn.Module):
    """A classifier that returns logits, or the loss if it gets labels."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))

    def forward(self, features: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        logits = self.net(features)
        return logits if labels is None else F.cross_entropy(logits, labels)


def names(needs: str) -> dict[str, Any]:
    """The modules and new objects that a page may use, and compiled objects if `needs` names them.

    The model has one layer, or two if `needs` has "layers".
    """
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, num_hidden_layers=2 if "layers" in needs else 1)
    model = LlamaForCausalLM(config).train()
    tokens = torch.randint(64, (8, 16))
    batch = {"input_ids": tokens, "labels": tokens}
    mesh = autoshard.Mesh({"data": 2, "model": 2})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    cluster = Cluster("h100_sxm", nodes=1, devices_per_node=8)
    given: dict[str, Any] = {
        "__name__": "__main__",
        "torch": torch,
        "nn": nn,
        "F": F,
        "autoshard": autoshard,
        "logging": logging,
        "DataLoader": DataLoader,
        "TensorDataset": TensorDataset,
        "LlamaForCausalLM": LlamaForCausalLM,
        "Cluster": Cluster,
        "P": P,
        "Recipe": Recipe,
        "config": config,
        "model": model,
        "batch": batch,
        "tokens": tokens,
        "targets": tokens,
        "mesh": mesh,
        "optimizer": optimizer,
        "cluster": cluster,
        "classifier": Classifier(),
        "features": torch.randn(8, 16),
        "labels": torch.randint(4, (8,)),
        "budget": 120_000,
    }
    if "sharded" in needs:
        given["sharded"] = autoshard.compile(model, mesh, example_inputs=batch)
    if "step" in needs:
        given["step"] = autoshard.compile(model, mesh, optimizer=optimizer, example_inputs=batch)
    if "plan" in needs:
        given["plan"] = autoshard.plan(model, cluster.mesh({"data": 8}), example_inputs=batch, optimizer="adamw")
    return given
