"""Runs of transformers' Trainer on a tiny GPT-2, in this process or as a script of two ranks under torchrun."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import EvalPrediction, GPT2Config, GPT2LMHeadModel, TrainingArguments

import autoshard

SIZES = {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "bos_token_id": 0}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

Losses = list[tuple[int, str, float]]


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**SIZES, **NO_DROPOUT, eos_token_id=0))


def rows(count: int = 23) -> list[dict[str, torch.Tensor]]:
    """Rows of 8 tokens, some of which are no targets of the loss."""
    tokens = torch.randint(64, (count, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row.where(row > number % 9, -100)} for number, row in enumerate(tokens)]


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    given: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
        "log_level": "error",
    }
    return TrainingArguments(str(folder), **(given | changes))


def trainer(folder: Path, mesh: Any = None, *, model: nn.Module | None = None, **changes: Any) -> Any:
    """A Trainer: transformers' own without a mesh, and autoshard's with one. Keywords that are no arguments of a
    Trainer are training arguments."""
    own = (
        *("compute_metrics", "data_collator", "train_dataset", "eval_dataset", "optimizers", "callbacks"),
        *("plan", "constraints", "options"),
    )
    given = {name: changes.pop(name) for name in own if name in changes}
    given = {"train_dataset": rows(), "eval_dataset": rows(7)} | given
    kind: Any = transformers.Trainer
    if mesh is not None:
        kind, given = autoshard.integrations.transformers.Trainer, given | {"mesh": mesh}
    return kind(model or gpt2(), arguments(folder, **changes), **given)


def losses(trainer: Any) -> Losses:
    """Step, name and value of each loss, norm and learning rate in the log."""
    log, names = trainer.state.log_history, ("loss", "grad_norm", "learning_rate", "eval_loss")
    return [(entry["step"], name, entry[name]) for entry in log for name in names if name in entry]


def accuracy(found: EvalPrediction) -> dict[str, float]:
    return {"hits": float((found.predictions.argmax(-1) == found.label_ids).mean())}


def masked(samples: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch in which random tokens are replaced by token 1."""
    batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
    return batch | {"input_ids": batch["input_ids"].masked_fill(torch.rand(batch["input_ids"].shape) < 0.3, 1)}


SAVED = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "max_steps": 5}


def whole_run(folder: Path, mesh: Any, **changes: Any) -> dict[str, Any]:
    """Train with checkpoints and metrics, resume from the first checkpoint, and evaluate. Returns
    losses and metrics."""
    first = trainer(folder / "first", mesh, compute_metrics=accuracy, **SAVED, **changes)
    first.train()
    trained, metrics = losses(first), first.evaluate()
    second = trainer(folder / "second", mesh, **SAVED, **changes)
    second.train(resume_from_checkpoint=str(folder / "first" / "checkpoint-2"))
    return {"losses": trained, "resumed": losses(second), "metrics": [metrics["eval_loss"], metrics["eval_hits"]]}


def main(arguments: Sequence[str]) -> None:
    """The script of a rank. `folder` is for the runs of two ranks, and `other` is a checkpoint of another number
    of ranks."""
    folder, other = map(Path, arguments)
    mesh = autoshard.Mesh({"ranks": 2})
    found: dict[str, Any] = {"plain": whole_run(folder / "plain", mesh)}
    accumulated = trainer(folder / "accumulated", mesh, gradient_accumulation_steps=2, max_steps=5)
    accumulated.train()
    found["accumulated"] = losses(accumulated)
    resumed = trainer(folder / "other", mesh, **SAVED)
    resumed.train(resume_from_checkpoint=str(other))
    found["other"] = losses(resumed)
    drawn = trainer(folder / "drawn", mesh, data_collator=masked, dataloader_num_workers=1, max_steps=2)
    drawn.train()
    found["drawn"] = losses(drawn)
    if os.environ["RANK"] == "0":
        (folder / "found.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
