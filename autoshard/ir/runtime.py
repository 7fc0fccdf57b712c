"""Runtimes: what executes a training step. Ours is `compile`; those of others have profiles that price their runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from autoshard.errors import NotAvailableError
from autoshard.ir.recipe import check_choice, check_count, check_flag
from cost_models.schedule_orders import SCHEDULES

AUTOSHARD = "autoshard"
"""The runtime of `autoshard.compile`: what it does is read off the lowered program, not said by a profile."""

MEGATRON = "megatron"
GRADIENT_DTYPES = ("bf16", "f16", "f32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """How a framework executes a recipe.

    Args:
        name: of the framework.
        early_stop: recomputing a block ends with the last value that its backward needs, before its last product
            (torch's checkpoints that are not reentrant).
        attention: the kernel of fused attention, by the device's names ("flash2"); None: the device's usual one.
        gradient_dtype: in which gradients are summed over micro-batches and reduced over replicas.
        separate_sum: a micro-batch's gradients, in 16 bits, are kept beside their sum in float32 (DeepSpeed's bf16
            optimizer; Megatron-LM adds each product to the sum at once).
        master_weights: the optimizer keeps parameters in float32.
        overlap_gradients: gradients are reduced while the backward of the last micro-batch runs.
        overlap_parameters: ZeRO-1/2 gather the updated parameters while the next forward runs, ZeRO-3 gathers each
            block's while the block before it runs.
        overlap_tensor: the backward's collectives over `tensor` run beside the products of weight gradients.
        overlap_pipeline: activations are sent between stages while others are computed.
        overlap_expert: expert all-to-alls of one micro-batch run beside the computation of another.
        overlap_offload: activations go to the host, and come back, beside computation; otherwise it waits for them.
        merged_dispatch: a token goes once to a rank that has several of its experts, over the network once to a node
            (DeepEP, HybridEP); otherwise once for each expert, and ranks sort by expert what comes.
        separate_experts: each expert's product is a kernel of its own (Transformer Engine's grouped layers on cuBLAS);
            otherwise one kernel has all experts of a rank.
        bucket_bytes: gradients and parameters are exchanged in pieces of about this size, at least one for each block
            under ZeRO-3.
        listed_collectives: gathers and scatters go through lists of a tensor for each rank, which the host copies one
            by one (torch.distributed.all_gather before torch 1.10).
        fused: chains of memory-bound operators run as one kernel each. The optimizer always does.
        cuda_graph: kernels are launched from a captured graph.
        blocking_launches: the host waits for each kernel before it issues the next (CUDA_LAUNCH_BLOCKING=1).
        schedules: of pipelines that it has, by the names of `Recipe.schedule`; (): all. A search proposes no other.
        zero_stages: ZeRO stages that it has; `zero_in_pipelines`: of these, the stages that it has with a pipeline.
        offloads_in_pipelines: whether activations may go to the host with a pipeline.

    Raises:
        RecipeError: a field has no such value; names it.

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
    overlap_gradients: bool = True
    overlap_parameters: bool = True
    overlap_tensor: bool = True
    overlap_pipeline: bool = False
    overlap_expert: bool = False
    overlap_offload: bool = True
    merged_dispatch: bool = False
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


OURS = Runtime(name=AUTOSHARD, early_stop=True, bucket_bytes=10**12, fused=False, overlap_offload=False)
"""Our own runtime where recipes are ranked before their programs are there; their prices are read off those."""

USUAL = Runtime(name=MEGATRON)
"""The choices of most frameworks; its prices are named after Megatron-LM."""

RUNTIMES: Mapping[str, Runtime] = {
    runtime.name: runtime
    for runtime in (
        # Megatron Core 0.15: p2p overlap, a product of cuBLAS for each expert. Experts' exchanges overlap another
        # micro-batch (overlap_moe_expert_parallel_comm) and go by DeepEP (moe_token_dispatcher_type "flex"). Schedules:
        # pipeline_parallel/schedules.py. The distributed optimizer is ZeRO-1; Megatron-FSDP's ZeRO-2 and -3, and
        # offloaded activations (cpu_offloading_num_layers), have no pipeline.
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
        # torch 2.13, torch/distributed/fsdp: a block's parameters at a time, checkpoints that are not reentrant, eager;
        # DistributedDataParallel, and fully_shard that frees parameters after the forward or keeps them
        Runtime(name="fsdp2", early_stop=True, bucket_bytes=10**12, fused=False, zero_stages=(0, 2, 3)),
        # DeepSpeed 0.17, runtime/bf16_optimizer.py, zero/config.py: gradients beside their sum, pieces of 5e8 elements;
        # runtime/pipe/engine.py: "ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism", one schedule
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
"""Runtimes by name, as their defaults are; sources beside each."""


def runtime_named(given: str | Runtime | None) -> Runtime | None:
    """The profile of another framework; None for our own runtime.

    Raises:
        NotAvailableError: no such runtime; lists those that there are.
    """
    if given in (None, AUTOSHARD) or isinstance(given, Runtime):
        return given if isinstance(given, Runtime) else None
    if given not in RUNTIMES:
        known = ", ".join(map(repr, (AUTOSHARD, *RUNTIMES)))
        raise NotAvailableError(f"runtime={given!r} is unknown; use one of {known}, or an autoshard.Runtime.")
    return RUNTIMES[given]
