"""Training of a small classifier: torchrun --standalone --nproc-per-node 2 train.py."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group()
rank, ranks = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(256, 64), torch.randint(16, (256,)))
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 16)).to(device)
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for features, labels in loader:
        loss = F.cross_entropy(model(features.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach_().div_(ranks))
        if rank == 0:
            print(f"loss {loss.item():.6f}")
dist.destroy_process_group()
