"""Print the page faults of a compiled step on one process; `test_freed_memory` runs this file."""

from __future__ import annotations

import resource
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import autoshard
from tests.models import Chain

WIDTH, LAYERS, ROWS = 256, 6, 2048
"""Sizes for activations of 2 MiB; 12 of them are saved for the backward."""
SETTLING, STEPS = 10, 6
"""Steps in which the heap may still grow, and steps that are counted."""


def main() -> None:
    """Print the minor page faults per step, after the first `SETTLING` steps."""
    torch.set_num_threads(1)
    store = Path(tempfile.mkdtemp()) / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("data",))
    model, x = Chain(WIDTH, LAYERS, nn.functional.gelu), torch.randn(ROWS, WIDTH)
    step = autoshard.compile(model, mesh, optimizer=torch.optim.AdamW(model.parameters()))
    for _ in range(SETTLING):
        step(x)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(STEPS):
        step(x)
    sys.stdout.write(str((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / STEPS))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
