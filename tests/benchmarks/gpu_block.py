"""A block of Llama 3 8B for `tests.benchmarks.gpu_kernels`: forward and backward, and its generated kernels.

The block is a decoder layer in bfloat16 with 2,048 to 8,192 tokens. `autoshard.compile` with `backend="triton"` on a
mesh of one device is timed beside `torch.compile` and eager. Gradients of parameters and of the input are made anew
each time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig

import autoshard
from autoshard.cluster import Cluster
from autoshard.kernels.generated.define import GeneratedKernel, generated_kernel
from cost_models.device import Device
from passes.lowering.fuse_kernels import FuseKernels
from passes.lowering.generate_kernels import GenerateKernels
from passes.lowering.split_phases import SplitPhases
from tests.benchmarks.fused_counts import Block, llama_block
from tests.benchmarks.gpu_case import Case, bytes_of

LENGTHS = (2048, 4096, 8192)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a block, by default of Llama 3 8B."""

    hidden: int = 4096
    inner: int = 14336
    heads: int = 32
    groups: int = 8


def make_block(length: int, sizes: Sizes, dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The block and its inputs, on the default device."""
    options: dict[str, Any] = {
        "hidden_size": sizes.hidden, "intermediate_size": sizes.inner, "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.groups, "max_position_embeddings": length, "attn_implementation": "sdpa",
    }  # fmt: skip
    x = torch.randn(1, length, sizes.hidden, dtype=dtype, requires_grad=True)
    return Block(LlamaConfig(**options)).to(dtype), (x, torch.arange(length)[None])


def compile_ours(block: nn.Module, inputs: tuple[Tensor, ...]) -> autoshard.ShardedModule:
    """A copy of the block, compiled by `autoshard.compile`. This process is the only rank of its process group."""
    kind = inputs[0].device.type
    if not dist.is_initialized():
        backend = "nccl" if kind == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(kind, (1,), mesh_dim_names=("x",))
    sharded = autoshard.compile(copy.deepcopy(block), mesh, example_inputs=inputs, backend="triton")
    assert isinstance(sharded, autoshard.ShardedModule), "no optimizer was given"
    return sharded


def step_of(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Callable[[], Any], list[Tensor]]:
    """A function that runs one forward and backward, and the tensors whose gradients are dropped before each run."""

    def step() -> Any:
        loss = module(*inputs)
        loss.backward()
        return loss

    return step, [*module.parameters(), *(x for x in inputs if x.requires_grad)]


def predict_s(length: int, device: Device) -> float:
    """Predict the step by a plan for one device, in seconds."""
    with torch.device("meta"):
        block, inputs = make_block(length, Sizes())
    plan = autoshard.plan(block, Cluster.of(device, 1, devices_per_node=1), example_inputs=inputs, backend="triton")
    return plan.predicted.step_time_s


def generated_cases(device: Device, length: int = 2048) -> Iterator[Case]:
    """Return the kernels generated for the block, each beside its group in ordinary operators."""
    phased = GenerateKernels(device)(SplitPhases()(FuseKernels()(llama_block(length=length))))
    targets = [node.target for phase in (phased.forward, phased.backward) for node in phase.graph.nodes]
    for target in dict.fromkeys(targets):
        kernel = generated_kernel(target)
        if kernel is not None:
            yield _generated_case(kernel)


def _generated_case(kernel: GeneratedKernel) -> Case:
    """Return a case on operands of ones, because some operands are denominators, indices or flags."""
    group = kernel.group
    place = torch.get_default_device()
    operands = [value.empty(place) for value in group.operands]
    for operand in operands:
        operand.fill_(1)
    results = [group.values[index].empty(torch.device("meta")) for index in group.results]
    name = f"generated: {kernel.name.removeprefix('autoshard::triton_')}"
    moved = bytes_of(*operands, *results)
    return Case(name, lambda: kernel.operator(*operands), lambda: group.run(operands), moved)


def flops_of(length: int, sizes: Sizes) -> float:
    """FLOPs of a step: three times the forward's for products, and 3.5 times the forward's causal half
    for attention."""
    depth = sizes.hidden // sizes.heads
    weights = 2 * sizes.hidden * (sizes.hidden + sizes.groups * depth) + 3 * sizes.hidden * sizes.inner
    return 6 * weights * length + 3.5 * 2 * sizes.hidden * length**2
