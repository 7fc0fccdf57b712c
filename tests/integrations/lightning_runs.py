"""Runs of Lightning's Trainer on a small classifier, in this process or as a script of two ranks under torchrun."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import autoshard
from autoshard.integrations.lightning import Strategy

Metrics = dict[str, float]


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
        self.accuracy = torchmetrics.MeanMetric()

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.net(features)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features, labels = batch
        logits = self(features)
        loss = F.cross_entropy(logits, labels)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"hits": (logits.argmax(-1) == labels).float().mean()}, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        features, labels = batch
        logits = self(features)
        self.accuracy((logits.argmax(-1) == labels).float())
        self.log("accuracy", self.accuracy)
        self.log("val_loss", F.cross_entropy(logits, labels))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class LogsLoss(Classifier):
    def training_step(self, batch: Any) -> Any:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return {"loss": loss}


class Seen(lightning.Callback):
    """Records the metrics of each training batch, and those of each validation."""

    def __init__(self) -> None:
        self.steps: list[Metrics] = []
        self.validated: list[Metrics] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        logged = {name: float(value) for name, value in trainer.logged_metrics.items() if name.endswith("_step")}
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        self.steps.append({**logged, "returned": float(outputs["loss"]), "rate": rate})

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            names = ("val_loss", "accuracy")
            self.validated.append({name: float(trainer.callback_metrics[name]) for name in names})


class Noisy(Dataset):
    """Rows that workers draw at random."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return torch.randn(16), index % 4


def rows(count: int = 23, start: int = 1) -> TensorDataset:
    random = torch.Generator().manual_seed(start)
    return TensorDataset(torch.randn(count, 16, generator=random), torch.randint(4, (count,), generator=random))


def trainer(folder: Path, strategy: Any = "auto", **changes: Any) -> lightning.Trainer:
    given: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 2,
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "logger": False,
    }
    return lightning.Trainer(default_root_dir=str(folder), strategy=strategy, **(given | changes))


def fit(
    folder: Path,
    strategy: Any = "auto",
    *,
    model: Any = Classifier,
    data: Any = None,
    resume: Any = None,
    **changes: Any,
) -> tuple[lightning.Trainer, Seen]:
    """Train a new `model` on shuffled batches of 6 rows, of which the last has 5. Returns the Trainer and a `Seen`."""
    lightning.seed_everything(0, workers=True, verbose=False)
    seen = Seen()
    callbacks = [seen, *changes.pop("callbacks", ())]
    found = trainer(folder, strategy, callbacks=callbacks, **changes)
    train = data or DataLoader(rows(), batch_size=6, shuffle=True)
    held_out = DataLoader(rows(8, start=2), batch_size=4)
    found.fit(model(), train, held_out, ckpt_path=resume, weights_only=False)
    return found, seen


def whole_run(folder: Path, strategy: Any = "auto") -> dict[str, Any]:
    """Train with a checkpoint for each epoch, then test. Returns the metrics that were seen."""
    checkpoint = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    found, seen = fit(folder, strategy, callbacks=[checkpoint], enable_checkpointing=True, gradient_clip_val=0.5)
    (tested,) = found.test(found.lightning_module, DataLoader(rows(8, start=3), batch_size=4), verbose=False)
    return {"steps": seen.steps, "validated": seen.validated, "tested": tested}


def resumed(path: Path, strategy: Any = "auto") -> dict[str, Any]:
    """Train the second epoch from the checkpoint after the first, and return the metrics that were seen."""
    _, seen = fit(path.parent, strategy, resume=path, gradient_clip_val=0.5)
    return {"steps": seen.steps, "validated": seen.validated}


def main(arguments: Sequence[str]) -> None:
    """The script of a rank. `folder` is for the runs of two ranks, and `other` is a checkpoint of one device."""
    folder, other = map(Path, arguments)

    def pair(**given: Any) -> Strategy:
        return Strategy(autoshard.Mesh({"ranks": 2}), **given)

    split = {"net.0.weight": autoshard.P("ranks", None)}
    found: dict[str, Any] = {"whole": whole_run(folder / "two", pair(constraints=split))}
    found["resumed"] = resumed(other, pair())
    found["noisy"] = fit(folder, pair(), data=DataLoader(Noisy(), batch_size=8, num_workers=1))[1].steps
    stages = Strategy(autoshard.Mesh({"pipeline": 2}), micro_batches=2)
    staged, seen = fit(folder, stages, model=LogsLoss, limit_val_batches=0)
    found["stages"] = seen.steps
    try:
        staged.save_checkpoint(folder / "staged.ckpt")
    except autoshard.NotAvailableError as error:
        found["refused"] = str(error)
    if torch.distributed.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
