"""TrainingArguments of a Trainer on a mesh: the refused ones, and a copy in which the mesh is one device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from transformers import TrainingArguments
from transformers.training_args import OptimizerNames, ParallelMode

from autoshard.errors import NotAvailableError

T = TypeVar("T", bound=TrainingArguments)

_BY_PLAN = "the planner decides how the model is split, and constraints= fixes decisions"
_NO_DDP = "no DistributedDataParallel wraps the model"
_BY_MEMORY = "the planner recomputes or offloads values where memory is short"
_ONE_BATCH = "every rank reads the same whole batch"

_REFUSED = {
    "fsdp": _BY_PLAN,
    "deepspeed": _BY_PLAN,
    "parallelism_config": "the mesh and the plan have all axes",
    "ddp_find_unused_parameters": _NO_DDP,
    "ddp_bucket_cap_mb": _NO_DDP,
    "ddp_broadcast_buffers": _NO_DDP,
    "ddp_static_graph": _NO_DDP,
    "activation_checkpointing": _BY_MEMORY,
    "gradient_checkpointing": _BY_MEMORY,
    "auto_find_batch_size": "compile fits the plan to the device's memory, or names the smallest memory that fits",
    "torch_compile": 'autoshard compiles the model; pass backend="inductor" to the Trainer',
    "use_liger_kernel": 'autoshard has its own kernels; pass backend="triton" to the Trainer',
    "neftune_noise_alpha": "a hook would add noise that differs between ranks",
    "label_smoothing_factor": "the loss is the loss that the model returns",
    "bf16_full_eval": "bf16=True computes training and evaluation in bfloat16",
    "fp16_full_eval": "the weights keep their types",
    "save_on_each_node": "all ranks write one folder, which all hosts must see",
    "enable_jit_checkpoint": "ranks would save at different steps",
    "eval_use_gather_object": _ONE_BATCH,
    "debug": "hooks on modules do not run in a compiled step",
}
"""Arguments that may not be set, with the reason or the way out."""

_REFUSED_OF_ACCELERATE = {
    "split_batches": _ONE_BATCH,
    "dispatch_batches": _ONE_BATCH,
    "gradient_accumulation_kwargs": "micro-batches of one step accumulate gradients",
}
"""Fields of `accelerator_config` that may not be set."""

_OPTIMIZERS = (
    *(OptimizerNames.ADAMW_TORCH, OptimizerNames.ADAMW_TORCH_FUSED, OptimizerNames.SGD),
    *(OptimizerNames.ADAGRAD, OptimizerNames.RMSPROP),
)


_PRECISIONS = {"no": None, "bf16": "bf16", "fp16": "f16"}


def check_arguments(args: TrainingArguments) -> None:
    """Check that a Trainer on a mesh can do what the arguments ask for.

    Raises:
        NotAvailableError: the Trainer cannot do so; the message names each argument.
    """
    found = list(_refused(args))
    if found:
        raise NotAvailableError(f"Trainer(mesh=...) cannot run with {'; '.join(found)}. Leave these arguments out.")


def _refused(args: TrainingArguments) -> Iterator[str]:
    for name, reason in _REFUSED.items():
        if getattr(args, name):
            yield f"{name}={getattr(args, name)!r}: {reason}"
    for name, reason in _REFUSED_OF_ACCELERATE.items():
        if getattr(args.accelerator_config, name):
            yield f"accelerator_config.{name}={getattr(args.accelerator_config, name)!r}: {reason}"
    if args.mixed_precision not in _PRECISIONS:
        yield f"mixed_precision={args.mixed_precision!r} of `accelerate launch`: it is none of {', '.join(_PRECISIONS)}"
    if args.optim not in _OPTIMIZERS:
        known = ", ".join(item.value for item in _OPTIMIZERS)
        yield f"optim={str(getattr(args.optim, 'value', args.optim))!r}: it is none of {known}; pass optimizers="


def precision_of(args: TrainingArguments) -> str | None:
    """Return the `precision` of `compile` for `bf16`, `fp16` or `accelerate launch`; None: the model's own types."""
    return _PRECISIONS[args.mixed_precision]


def as_one_device(args: T) -> T:
    """Return a copy of the arguments for a Trainer to which the whole mesh is one device.

    A batch of the copy is the batch of an update: `gradient_accumulation_steps` batches, which the step cuts into
    micro-batches. Which process writes and logs stays as it is.
    """
    kind = type(args)
    result: Any = object.__new__(type(kind.__name__, (_WholeMesh, kind), {"__module__": kind.__module__}))
    vars(result).update(vars(args))
    result.per_device_train_batch_size = args.per_device_train_batch_size * args.gradient_accumulation_steps
    result.gradient_accumulation_steps = 1
    return result


class _WholeMesh:
    """Mixed into a class of training arguments: one process on at most one device."""

    @property
    def world_size(self) -> int:
        return 1

    @property
    def parallel_mode(self) -> ParallelMode:
        return ParallelMode.NOT_PARALLEL

    @property
    def n_gpu(self) -> int:
        found: Any = super()
        return min(found.n_gpu, 1)
