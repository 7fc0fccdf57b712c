"""A `parallelize_fn` for torchtitan, in place of tensor parallelism and FSDP."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils import _pytree as pytree

import autoshard

_PRECISIONS = {"bfloat16": "bf16", "float16": "f16", "float32": None}


class OwnRows(nn.Module):
    """A compiled model that takes this rank's rows, and returns this rank's rows of the output."""

    def __init__(self, model: nn.Module, example: torch.Tensor, precision: str | None) -> None:
        super().__init__()
        self.mesh = dist.init_device_mesh(example.device.type, (dist.get_world_size(),), mesh_dim_names=("ranks",))
        self.model = autoshard.compile(model, self.mesh, example_inputs=(example,), precision=precision)

    def forward(self, *args: Any, **options: Any) -> torch.Tensor:
        args, options = pytree.tree_map_only(torch.Tensor, self._whole, (args, options))
        return self.model(*args, **options).redistribute(self.mesh, [Shard(0)]).to_local()

    def _whole(self, rows: torch.Tensor) -> torch.Tensor:
        return DTensor.from_local(rows, self.mesh, [Shard(0)], run_check=False)

    def to_empty(self, **options: Any) -> OwnRows:
        return self  # init_weights makes the shards

    def init_weights(self, **options: Any) -> None:
        self.model.init_weights(torch.initial_seed())


def parallelize(model: nn.Module, *, training: Any, **settings: Any) -> nn.Module:
    """torchtitan calls this with a model on the meta device, `parallel_dims`, `training` and other settings."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch = training.local_batch_size * dist.get_world_size()
    example = torch.zeros(batch, training.seq_len, dtype=torch.int64, device=device)
    return OwnRows(model.train(), example, _PRECISIONS[training.mixed_precision_param])
