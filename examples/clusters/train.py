"""A training run that goes on by itself on any cluster: python examples/clusters/train.py [STEPS].

Start it by `torchrun`, or by the other files of this folder: `train.sbatch`, `pytorchjob.yaml`, `ray_train.py`. The
page is docs/how_to/clusters.md.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import autoshard

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = int(sys.argv[1]) if sys.argv[1:] else 100


def batch(number: int) -> torch.Tensor:  # your data: whole batches, the same on every rank
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(number)).to(DEVICE)


def train(run: autoshard.Run) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    step = autoshard.compile(
        model,
        autoshard.Mesh({"data": run.ranks}),  # the ranks of this start
        optimizer=optimizer,
        loss_fn=lambda output: output.square().mean(),
        example_inputs=(batch(0),),
    )
    for number in run.steps(step, STEPS, schedule=schedule):
        loss = step(batch(number))
        schedule.step()
        if run.rank == 0:
            print(f"step {number} on {run.ranks} ranks: loss {loss.item():.6f}", flush=True)


if __name__ == "__main__":
    autoshard.run(train, checkpoints=autoshard.Checkpoints("checkpoints", every=20, keep=2))
