"""A rank that trains twice under an Accelerator: with `prepare`, and with a step of autoshard, and
compares the losses."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autoshard


def parts() -> tuple[TensorDataset, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(64, 16), torch.randint(4, (64,)))
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    return dataset, model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def by_accelerate(accelerator: Accelerator) -> list[float]:
    dataset, model, optimizer = parts()
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(dataset, batch_size=8))
    losses = []
    for features, labels in loader:
        loss = nn.functional.cross_entropy(model(features), labels)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


def by_autoshard(accelerator: Accelerator) -> list[float]:
    dataset, model, optimizer = parts()
    ranks = accelerator.num_processes
    step = autoshard.compile(
        model,
        autoshard.Mesh({"ranks": ranks}),
        optimizer=optimizer,
        loss_fn=nn.functional.cross_entropy,
        max_grad_norm=1.0,
    )
    loader = autoshard.data.loader(dataset, step, batch_size=8 * ranks, shuffle=False)
    return [step(features, labels).item() for features, labels in loader]


def main() -> None:
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    expected, found = by_accelerate(accelerator), by_autoshard(accelerator)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    accelerator.print(f"{len(found)} equal losses")
    accelerator.end_training()


if __name__ == "__main__":
    main()
