"""Contenders of `tests.benchmarks.step_time`: our plans, requested as by users, and the same step by hand.

Every contender makes the model anew with equal weights, and updates by fused AdamW. Rivals run at their best: their
options are tried for a few steps, and the fastest variant races.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import autoshard
from autoshard import P
from tests.benchmarks.races import mesh_along, times_of
from tests.benchmarks.step_cases import Batch, Case, make_model
from tests.benchmarks.step_tensor_parallel import parallelize, tensor_specs

Step = Callable[[Batch], Tensor]
"""One training step on a global batch; the loss of this rank's part, or of the whole batch."""

BUCKETS_MB = (1, 5, 25, 100)
_TRIALS = 3


def make_step(name: str, case: Case, batch: Batch) -> Step:
    """The step of a contender; rivals are tuned on `batch`."""
    variants = _CONTENDERS[name]
    if len(variants) == 1:
        return variants[0](case)
    times = [_time_of(variant, case, batch) for variant in variants]
    return variants[times.index(min(times))](case)


def _time_of(variant: Callable[[Case], Step], case: Case, batch: Batch) -> float:
    """Median seconds of a few steps, on the slowest rank."""
    step = variant(case)
    step(batch)
    times = [times_of(step, batch)[0] for _ in range(_TRIALS)]
    del step
    gc.collect()
    return statistics.median(times)


def _adamw(parameters: Iterator[nn.Parameter]) -> torch.optim.AdamW:
    """Return fused AdamW, with DTensors in a separate group, because a fused call takes no mixture."""
    listed = list(parameters)
    groups = [[each for each in listed if isinstance(each, DTensor) == split] for split in (True, False)]
    return torch.optim.AdamW([{"params": group} for group in groups if group], lr=1e-4, fused=True)


def _local_part(batch: Batch) -> Batch:
    """This rank's rows."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return {name: tensor.chunk(ranks)[rank] for name, tensor in batch.items()}


def _by_hand(
    module: Callable[..., Any],
    parameters: Iterator[nn.Parameter],
    part: Callable[[Batch], Batch] = lambda batch: batch,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Step:
    """A training step as a user writes it."""
    optimizer = _adamw(parameters)

    def step(batch: Batch) -> Tensor:
        optimizer.zero_grad()
        with around():
            loss = module(**part(batch)).loss
            loss.backward()
        optimizer.step()
        return loss.full_tensor().detach() if isinstance(loss, DTensor) else loss.detach()

    return step


def _eager(case: Case) -> Step:
    model = make_model(case)
    return _by_hand(model, model.parameters())


def _torch_compile(case: Case) -> Step:
    model = make_model(case)
    return _by_hand(torch.compile(model, dynamic=False), model.parameters())


def _ddp(case: Case, bucket_mb: int) -> Step:
    model = make_model(case)
    wrapped = DistributedDataParallel(
        model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True, static_graph=True, broadcast_buffers=False
    )
    return _by_hand(wrapped, model.parameters(), _local_part)


def _fsdp2(case: Case, ahead: int) -> Step:
    """Wrap a model in FSDP2 by blocks; `ahead` blocks are prefetched beyond FSDP2's own prefetching."""
    model, mesh = make_model(case), mesh_along("data")
    blocks = [fully_shard(block, mesh=mesh) for block in _blocks_of(model)]
    fully_shard(model, mesh=mesh)
    if ahead:
        for index, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + ahead])
            block.set_modules_to_backward_prefetch(blocks[max(0, index - ahead) : index][::-1])
    return _by_hand(model, model.parameters(), _local_part)


def _blocks_of(model: nn.Module) -> nn.ModuleList:
    """The model's repeated layers: its longest list of modules."""
    return max((module for module in model.modules() if isinstance(module, nn.ModuleList)), key=len)


def _dtensor(case: Case, head: str) -> Step:
    """A step with tensor parallelism by `parallelize_module`."""
    model, around = parallelize(make_model(case), mesh_along("model"), head)
    return _by_hand(model, model.parameters(), around=around)


def _ours(
    case: Case,
    axis: str = "data",
    specs: Callable[[nn.Module], Mapping[str, autoshard.PartitionSpec]] | None = None,
    backend: str = "auto",
) -> Step:
    """The compiled step. Parameters and inputs have the layouts that `specs` returns, or the planner chooses
    without it."""
    model = make_model(case)
    constraints = None if specs is None else specs(model)
    step = autoshard.compile(
        model, mesh_along(axis), optimizer=_adamw(model.parameters()), constraints=constraints, backend=backend
    )

    def run(batch: Batch) -> Tensor:
        return step(**batch)

    return run


def _data_specs(model: nn.Module) -> dict[str, autoshard.PartitionSpec]:
    return {"input:*": P("data"), **{name: P() for name, _ in model.named_parameters()}}


def _sharded_specs(model: nn.Module) -> dict[str, autoshard.PartitionSpec]:
    """Constraints that split the inputs, and each parameter whose first dim the ranks divide, along that dim."""
    ranks = dist.get_world_size()
    names = [name for name, parameter in model.named_parameters() if parameter.shape[0] % ranks == 0]
    return {"input:*": P("data"), **{name: P("data") for name in names}}


_CONTENDERS: Mapping[str, Sequence[Callable[[Case], Step]]] = {
    "eager": (_eager,),
    "torch.compile": (_torch_compile,),
    "DDP": tuple(partial(_ddp, bucket_mb=size) for size in BUCKETS_MB),
    "FSDP2": tuple(partial(_fsdp2, ahead=ahead) for ahead in (0, 1, 2)),
    "DTensor": (partial(_dtensor, head="split loss"), partial(_dtensor, head="whole")),
    "mesh of one": (_ours,),
    "mesh of one, inductor": (partial(_ours, backend="inductor"),),
    "data-parallel plan": (partial(_ours, specs=_data_specs),),
    "fully sharded plan": (partial(_ours, specs=_sharded_specs),),
    "tensor-parallel plan": (partial(_ours, axis="model", specs=tensor_specs),),
    "free choice": (_ours,),
}
