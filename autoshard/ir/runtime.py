"""Frameworks whose training steps are priced: autoshard, and others such as Megatron-LM.

Autoshard's steps are read off the lowered program. A `Runtime` says how another framework runs a step, such as which
communication it overlaps, and in which type it stores gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from autoshard.errors import NotAvailableError
from autoshard.ir.recipe import check_choice, check_count, check_flag
from cost_models.schedule_orders import SCHEDULES

AUTOSHARD = "autoshard"
"""Name of the runtime of `autoshard.compile`. Its behaviour is read off the lowered program, so it has no `Runtime`."""

MEGATRON = "megatron"
GRADIENT_DTYPES = ("bf16", "f16", "f32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """The way in which a framework executes a recipe, for `autoshard.price` and `autoshard.plan(runtime=)`.

    `autoshard.ir.runtime.RUNTIMES` has "megatron", "fsdp2" and "deepspeed". Only `name` is required. True by default
    are `master_weights`, `narrow_copies`, `overlap_gradients`, `overlap_parameters`, `overlap_tensor`,
    `overlap_offload`, `folded_experts`, `fused` and `offloads_in_pipelines`. All other flags are False by default.

    Args:
        name: name of the framework.
        early_stop: recomputation of a block ends with the last value that the backward needs, so the last product is
            left out. Checkpoints of torch that are not reentrant do this.
        attention: kernel of fused attention, such as "flash2". None, the default: the device's usual kernel.
        gradient_dtype: type in which gradients are summed over micro-batches and reduced over replicas: "bf16", "f16"
            or "f32" (default).
        separate_sum: a micro-batch's 16-bit gradients are stored beside their float32 sum, as in DeepSpeed's bf16
            optimizer. Otherwise each product is added to the sum at once, as in Megatron-LM.
        master_weights: the optimizer keeps trained parameters in float32.
        frozen_masters: parameters without gradients are kept in float32 too.
        narrow_copies: below ZeRO-3, each rank also holds all parameters in the 16-bit type of the products, and ZeRO
            shards the float32 originals. Otherwise each product casts its parameters.
        overlap_gradients: gradients are reduced during the backward of the last micro-batch.
        overlap_parameters: ZeRO-1 and ZeRO-2 gather updated parameters during the next forward. ZeRO-3 gathers a
            block's parameters during the block before it.
        overlap_tensor: the backward's collectives over `tensor` run beside the products of weight gradients.
        overlap_pipeline: messages between stages travel during computation.
        overlap_expert: all-to-alls of experts run beside the computation of another micro-batch.
        overlap_offload: activations travel to the host and back during computation. Otherwise the step waits for them.
        merged_dispatch: a token is sent once to each rank with some of its experts, and once to each node (DeepEP,
            HybridEP). Otherwise it is sent once for each expert, and ranks sort received tokens by expert.
        folded_experts: an expert group has consecutive ranks, as in Megatron-Core's parallel folding. With data=4,
            tensor=2 and expert=4, the groups are ranks 0 to 3, and 4 to 7. Otherwise the ranks of a group differ in
            `data` alone: ranks 0, 2, 4, 6, and 1, 3, 5, 7. `expert` must then divide `data`.
        separate_experts: each expert's product is a kernel of its own, as in Transformer Engine. Otherwise one kernel
            computes all experts of a rank.
        bucket_bytes: bytes of a bucket in which gradients and parameters are exchanged; default 200,000,000. ZeRO-3 has
            at least one bucket for each block.
        listed_collectives: all-gathers and reduce-scatters take a list with one tensor per rank, which the host copies
            one by one.
        fused: a chain of memory-bound operators runs as one kernel. The optimizer is always fused.
        cuda_graph: kernels are launched from a captured CUDA graph.
        blocking_launches: the host waits for each kernel before it issues the next (CUDA_LAUNCH_BLOCKING=1).
        schedules: pipeline schedules that a search may propose, by the names of `Recipe.schedule`. (), the default,
            allows all.
        zero_stages: ZeRO stages that the framework has; default (0, 1, 2, 3).
        zero_in_pipelines: ZeRO stages that work together with a pipeline; default (0, 1, 2, 3).
        offloads_in_pipelines: activations may be offloaded together with a pipeline.

    Raises:
        RecipeError: a field has an invalid value. The message names the field.

    Example:
        >>> RUNTIMES["fsdp2"].fused
        False
    """

    name: str
    early_stop: bool = False
    attention: str | None = None
    gradient_dtype: str = "f32"
    separate_sum: bool = False
    master_weights: bool = True
    frozen_masters: bool = False
    narrow_copies: bool = True
    overlap_gradients: bool = True
    overlap_parameters: bool = True
    overlap_tensor: bool = True
    overlap_pipeline: bool = False
    overlap_expert: bool = False
    overlap_offload: bool = True
    merged_dispatch: bool = False
    folded_experts: bool = True
    separate_experts: bool = False
    bucket_bytes: int = 200_000_000
    listed_collectives: bool = False
    fused: bool = True
    cuda_graph: bool = False
    blocking_launches: bool = False
    schedules: tuple[str, ...] = ()
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    zero_in_pipelines: tuple[int, ...] = (0, 1, 2, 3)
    offloads_in_pipelines: bool = True

    def __post_init__(self) -> None:
        check_count("bucket_bytes", self.bucket_bytes)
        check_choice("gradient_dtype", self.gradient_dtype, GRADIENT_DTYPES)
        for name in self.schedules:
            check_choice("schedules", name, tuple(SCHEDULES))
        for stage in (*self.zero_stages, *self.zero_in_pipelines):
            check_choice("zero", stage, (0, 1, 2, 3))
        for item in fields(self):
            if item.type == "bool":
                check_flag(item.name, getattr(self, item.name))


OURS = Runtime(
    name=AUTOSHARD,
    early_stop=True,
    narrow_copies=False,
    bucket_bytes=10**12,
    fused=False,
    overlap_offload=False,
    folded_experts=False,
)
"""Our own runtime, for ranking recipes before their programs exist. Final prices are read off the programs."""

USUAL = Runtime(name=MEGATRON)
"""The common choices of frameworks, shown under Megatron-LM's name."""

RUNTIMES: Mapping[str, Runtime] = {
    runtime.name: runtime
    for runtime in (
        # Megatron Core 0.15. Messages between stages overlap computation, and each expert has a cuBLAS product of its
        # own. All-to-alls of experts overlap another micro-batch (overlap_moe_expert_parallel_comm) and use DeepEP
        # (moe_token_dispatcher_type "flex"). pipeline_parallel/schedules.py has the schedules. The distributed
        # optimizer is ZeRO-1. Megatron-FSDP's ZeRO-2 and ZeRO-3 work without a pipeline only, and so do offloaded
        # activations (cpu_offloading_num_layers).
        Runtime(
            name=MEGATRON,
            overlap_pipeline=True,
            overlap_expert=True,
            merged_dispatch=True,
            separate_experts=True,
            schedules=("1F1B", "Interleaved1F1B"),
            zero_in_pipelines=(0, 1),
            offloads_in_pipelines=False,
        ),
        # torch 2.13, torch/distributed/fsdp, in eager mode. Each block is a bucket, and checkpoints are not reentrant.
        # DistributedDataParallel is ZeRO stage 0. fully_shard is stage 2 or 3, by reshard_after_forward.
        Runtime(name="fsdp2", early_stop=True, bucket_bytes=10**12, fused=False, zero_stages=(0, 2, 3)),
        # DeepSpeed 0.17. By bf16_optimizer.py and zero/config.py, gradients are stored beside their sum, in pieces of
        # 5e8 elements. The file pipe/engine.py has one schedule. It says "ZeRO-2 and ZeRO-3 are incompatible with
        # pipeline parallelism".
        Runtime(
            name="deepspeed",
            separate_sum=True,
            overlap_tensor=False,
            bucket_bytes=10**9,
            fused=False,
            schedules=("1F1B",),
            zero_in_pipelines=(0, 1),
        ),
    )
}
"""Runtimes by name, with the frameworks' default settings and their sources."""


def runtime_named(given: str | Runtime | None) -> Runtime | None:
    """Return the `Runtime` of another framework, or None for our own; raise `NotAvailableError` for an unknown name."""
    if given in (None, AUTOSHARD) or isinstance(given, Runtime):
        return given if isinstance(given, Runtime) else None
    if given not in RUNTIMES:
        known = ", ".join(map(repr, (AUTOSHARD, *RUNTIMES)))
        raise NotAvailableError(f"runtime={given!r} is unknown; use one of {known}, or an autoshard.Runtime.")
    return RUNTIMES[given]
