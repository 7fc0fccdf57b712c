"""Contenders of `tests.benchmarks.step_time`: our plans, asked for as users would, and the same step by hand.

Every contender makes the model anew, with the same weights, and updates by fused AdamW. Rivals run at their best: what
they can be tuned by is tried for a few steps, and the fastest variant races.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import autoshard
from autoshard import P
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
    step, times = variant(case), []
    step(batch)
    for _ in range(_TRIALS):
        times.append(time_of(step, batch))
    del step
    gc.collect()
    return statistics.median(times)


def time_of(step: Step, batch: Batch) -> float:
    """Seconds of one step on the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    step(batch)
    found = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def _adamw(parameters: Iterator[nn.Parameter]) -> torch.optim.AdamW:
    """Fused AdamW; DTensors in a group of their own, as one fused call takes no others beside them."""
    listed = list(parameters)
    groups = [[each for each in listed if isinstance(each, DTensor) == split] for split in (True, False)]
    return torch.optim.AdamW([{"params": group} for group in groups if group], lr=1e-4, fused=True)


def _local_part(batch: Batch) -> Batch:
    """This rank's rows."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return {name: tensor.chunk(ranks)[rank] for name, tensor in batch.items()}


def _mesh(axis: str) -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(axis,))


def _by_hand(
    module: Callable[..., Any],
    parameters: Iterator[nn.Parameter],
    part: Callable[[Batch], Batch] = lambda batch: batch,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Step:
    """The loop that a user writes."""
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


def _fsdp2(case: Case, ahead: int, by_all_to_all: bool = False) -> Step:
    """FSDP2 by blocks; `ahead` blocks are asked for beside FSDP2's own prefetching."""
    model, mesh = make_model(case), _mesh("data")
    blocks = [fully_shard(block, mesh=mesh) for block in _blocks_of(model)]
    fully_shard(model, mesh=mesh)
    if ahead:
        for index, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + ahead])
            block.set_modules_to_backward_prefetch(blocks[max(0, index - ahead) : index][::-1])
    if by_all_to_all:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(_ReduceScatterByAllToAll())
    return _by_hand(model, model.parameters(), _local_part)


def _blocks_of(model: nn.Module) -> nn.ModuleList:
    """The model's repeated layers: its longest list of modules."""
    return max((module for module in model.modules() if isinstance(module, nn.ModuleList)), key=len)


class _ReduceScatterByAllToAll(ReduceScatter):
    """FSDP2's reduce-scatter as ours is on Gloo: an all-to-all, and a sum in the order of ranks."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what is reduced."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Sum, or average, this rank's part of everyone's `input_tensor` into `output_tensor`."""
        ranks = dist.get_world_size(group)
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        torch.sum(parts.view(ranks, *output_tensor.shape), 0, out=output_tensor)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(ranks)


def _dtensor(case: Case, head: str) -> Step:
    """Tensor parallelism by `parallelize_module`."""
    model, around = parallelize(make_model(case), _mesh("model"), head)
    return _by_hand(model, model.parameters(), around=around)


def _ours(
    case: Case,
    axis: str = "data",
    specs: Callable[[nn.Module], Mapping[str, autoshard.PartitionSpec]] | None = None,
    backend: str = "auto",
) -> Step:
    """The compiled step; parameters and inputs lie as `specs` says, else as the planner likes."""
    model = make_model(case)
    constraints = None if specs is None else specs(model)
    step = autoshard.compile(
        model, _mesh(axis), optimizer=_adamw(model.parameters()), constraints=constraints, backend=backend
    )

    def run(batch: Batch) -> Tensor:
        return step(**batch)

    return run


def _data_specs(model: nn.Module) -> dict[str, autoshard.PartitionSpec]:
    return {"input:*": P("data"), **{name: P() for name, _ in model.named_parameters()}}


def _sharded_specs(model: nn.Module) -> dict[str, autoshard.PartitionSpec]:
    """Every parameter that divides is split over its first dim."""
    ranks = dist.get_world_size()
    names = [name for name, parameter in model.named_parameters() if parameter.shape[0] % ranks == 0]
    return {"input:*": P("data"), **{name: P("data") for name in names}}


_AHEAD = (0, 1, 2)
_CONTENDERS: Mapping[str, Sequence[Callable[[Case], Step]]] = {
    "eager": (_eager,),
    "torch.compile": (_torch_compile,),
    "DDP": tuple(partial(_ddp, bucket_mb=size) for size in BUCKETS_MB),
    "FSDP2": tuple(partial(_fsdp2, ahead=ahead) for ahead in _AHEAD),
    "FSDP2, our reduce-scatter": tuple(partial(_fsdp2, ahead=ahead, by_all_to_all=True) for ahead in _AHEAD),
    "DTensor": (partial(_dtensor, head="split loss"), partial(_dtensor, head="whole")),
    "mesh of one": (_ours,),
    "mesh of one, inductor": (partial(_ours, backend="inductor"),),
    "data-parallel plan": (partial(_ours, specs=_data_specs),),
    "fully sharded plan": (partial(_ours, specs=_sharded_specs),),
    "tensor-parallel plan": (partial(_ours, axis="model", specs=tensor_specs),),
    "free choice": (_ours,),
}
