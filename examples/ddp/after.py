"""Training of a small classifier: torchrun --standalone --nproc-per-node 2 train.py."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import autoshard

dist.init_process_group()
rank, ranks = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(256, 64), torch.randint(16, (256,)))
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 16)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
step = autoshard.compile(model, autoshard.Mesh({"ranks": ranks}), optimizer=optimizer, loss_fn=F.cross_entropy)
loader = autoshard.data.loader(dataset, step, batch_size=8 * ranks)
for epoch in range(2):
    loader.set_epoch(epoch)
    for features, labels in loader:
        loss = step(features, labels)
        if rank == 0:
            print(f"loss {loss.item():.6f}")
dist.destroy_process_group()
